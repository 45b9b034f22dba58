/* Addresses that no sandbox reaches, whatever its policy. One list for the C program (policy.c) and for Python
 * (policy.py), which reads this file: one NEVER on each line, a network and why.
 *
 * IPv4 addresses in here are refused inside of IPv6 addresses too (policy.c, `embedded`). Not in here: the host's own
 * addresses, which the kernel's routes know. */
NEVER("0.0.0.0/8", "this network")
NEVER("100.100.100.200/32", "metadata: Alibaba")
NEVER("127.0.0.0/8", "loopback")
NEVER("168.63.129.16/32", "wire server: Azure")
NEVER("169.254.0.0/16", "link-local; metadata: AWS, Google, Azure, IBM, Oracle, Tencent, Huawei, DigitalOcean, Hetzner, Vultr, OpenStack and others")
NEVER("192.0.0.192/32", "metadata: Oracle, at customers")
NEVER("198.18.0.1/32", "the sandbox itself")
NEVER("224.0.0.0/3", "multicast, reserved, broadcast")
NEVER("::/32", "none, loopback, and forms of IPv4 that nobody routes")
NEVER("fd00:42::42/128", "metadata: Scaleway")
NEVER("fd00:100::100:200/128", "metadata: Alibaba")
NEVER("fd00:a9fe:a9fe::1/128", "metadata: Akamai, Linode")
NEVER("fd00:c1::a9fe:a9fe/128", "metadata: Oracle")
NEVER("fd00:ec2::/32", "metadata: AWS")
NEVER("fd20:ce::/32", "metadata: Google")
NEVER("fd64:7574::/32", "the sandbox itself")
NEVER("fe80::/10", "link-local; metadata: OpenStack, Akamai, Hetzner")
NEVER("fec0::/10", "site-local")
NEVER("ff00::/8", "multicast")
