/* Addresses that no sandbox can reach, whatever its network policy. The C program (policy.c) and Python
 * (engine/launcher/network_policy.py) both read this file: one DENIED per line, with a network and the reason.
 *
 * IPv4 networks also apply to IPv4 addresses inside IPv6 addresses (policy_embedded). The host's own addresses are not
 * listed: the kernel's routes know them (is_host_address). */
DENIED("0.0.0.0/8", "this network")
DENIED("100.100.100.200/32", "metadata: Alibaba")
DENIED("127.0.0.0/8", "loopback")
DENIED("168.63.129.16/32", "wire server: Azure")
DENIED("169.254.0.0/16", "link-local; metadata: AWS, Google, Azure, IBM, Oracle, Tencent, Huawei, DigitalOcean, Hetzner, Vultr, OpenStack and others")
DENIED("192.0.0.192/32", "metadata: Oracle, at customers")
DENIED("198.18.0.1/32", "the sandbox itself")
DENIED("224.0.0.0/3", "multicast, reserved, broadcast")
DENIED("::/32", "none, loopback, and forms of IPv4 that nobody routes")
DENIED("fd00:42::42/128", "metadata: Scaleway")
DENIED("fd00:100::100:200/128", "metadata: Alibaba")
DENIED("fd00:a9fe:a9fe::1/128", "metadata: Akamai, Linode")
DENIED("fd00:c1::a9fe:a9fe/128", "metadata: Oracle")
DENIED("fd00:ec2::/32", "metadata: AWS")
DENIED("fd20:ce::/32", "metadata: Google")
DENIED("fd64:7574::/32", "the sandbox itself")
DENIED("fe80::/10", "link-local; metadata: OpenStack, Akamai, Hetzner")
DENIED("fec0::/10", "site-local")
DENIED("ff00::/8", "multicast")
