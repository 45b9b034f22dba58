#define _GNU_SOURCE
#include "network.h"

#include "host.h"
#include "sys.h"

#include <arpa/inet.h>
#include <linux/bpf.h>
#include <linux/fib_rules.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define TABLE 100      /* of routes, in the sandbox's network */
#define PRIORITY 100   /* of the rule that leads there: after what is local */
#define LISTENER_PORT 1 /* no server wants it; another one if it is taken */
#define BACKLOG 256
#define LOOPBACK 1 /* the first interface of a network is this */

static int host_network = -1;
static bool ipv6; /* the host has a way out */

int network_prepare(int network)
{
	struct sockaddr_in6 outside = {.sin6_family = AF_INET6, .sin6_port = htons(53)};
	AUTOCLOSE int probe = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	host_network = network;
	/* Sends nothing, but needs a route. Without one, programs in sandboxes shall not try IPv6 first. */
	outside.sin6_addr.s6_addr[0] = 0x20;
	ipv6 = probe >= 0 && connect(probe, (struct sockaddr *)&outside, sizeof outside) == 0;
	return 0;
}

static int enter(int network)
{
	return setns(network, CLONE_NEWNET) < 0 ? -errno : 0;
}

static void come_back(void)
{
	if (setns(host_network, CLONE_NEWNET) < 0)
		abort(); /* in the wrong network nothing may go on */
}

/* --- Routes ------------------------------------------------------------------------------------------ */

/* Several changes in one message to the kernel. */
struct changes {
	char bytes[1024];
	size_t size;
	unsigned count;
	struct nlmsghdr *last;
};

static void *change(struct changes *changes, uint16_t type, uint16_t flags, const void *body, size_t size)
{
	struct nlmsghdr *head = (struct nlmsghdr *)(void *)(changes->bytes + changes->size);

	if (changes->size + NLMSG_SPACE(size) + 128 > sizeof changes->bytes)
		abort();
	*head = (struct nlmsghdr){.nlmsg_len = (uint32_t)NLMSG_LENGTH(size),
				  .nlmsg_type = type,
				  .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | flags,
				  .nlmsg_seq = ++changes->count};
	memcpy(NLMSG_DATA(head), body, size);
	changes->last = head;
	changes->size += NLMSG_SPACE(size);
	return head;
}

static void attribute(struct changes *changes, uint16_t type, const void *value, uint16_t size)
{
	struct rtattr *head = (struct rtattr *)(void *)(changes->bytes + changes->size);

	*head = (struct rtattr){.rta_len = (uint16_t)RTA_LENGTH(size), .rta_type = type};
	memcpy(RTA_DATA(head), value, size);
	changes->size += RTA_SPACE(size);
	changes->last->nlmsg_len += (uint32_t)RTA_SPACE(size);
}

static int apply(struct changes *changes, bool tolerant)
{
	AUTOCLOSE int netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	char answer[4096];
	int error = 0;

	if (netlink < 0 || send(netlink, changes->bytes, changes->size, 0) < 0)
		return -errno;
	for (unsigned seen = 0; seen < changes->count;) {
		ssize_t size = recv(netlink, answer, sizeof answer, 0);
		if (size < 0)
			return -errno;
		for (struct nlmsghdr *at = (struct nlmsghdr *)(void *)answer; NLMSG_OK(at, size); at = NLMSG_NEXT(at, size)) {
			const struct nlmsgerr *said = NLMSG_DATA(at);
			if (at->nlmsg_type == NLMSG_ERROR && said->error && !error)
				error = said->error;
			seen++;
		}
	}
	return tolerant ? 0 : error;
}

static void route(struct changes *changes, uint16_t type, uint8_t kind, uint32_t address, uint8_t bits, uint8_t family)
{
	const uint32_t interface = LOOPBACK, network = htonl(address), table = TABLE;
	struct rtmsg body = {.rtm_family = family,
			     .rtm_dst_len = bits,
			     .rtm_table = TABLE,
			     .rtm_protocol = RTPROT_STATIC,
			     .rtm_scope = kind == RTN_LOCAL ? RT_SCOPE_HOST : RT_SCOPE_UNIVERSE,
			     .rtm_type = kind};

	change(changes, type, type == RTM_NEWROUTE ? NLM_F_CREATE | NLM_F_REPLACE : 0, &body, sizeof body);
	attribute(changes, RTA_TABLE, &table, sizeof table);
	if (bits)
		attribute(changes, RTA_DST, &network, sizeof network);
	if (kind == RTN_LOCAL)
		attribute(changes, RTA_OIF, &interface, sizeof interface);
	if (kind == RTN_LOCAL && family == AF_INET) {
		const uint32_t self = htonl(ADDRESS_SELF);
		attribute(changes, RTA_PREFSRC, &self, sizeof self);
	}
}

/* TCP alone: for all else there is no way, and programs hear so at once. */
static void rule(struct changes *changes, uint16_t type, uint8_t family)
{
	struct fib_rule_hdr body = {.family = family, .table = TABLE, .action = FR_ACT_TO_TBL};
	const uint32_t priority = PRIORITY;
	const uint8_t protocol = IPPROTO_TCP;

	change(changes, type, type == RTM_NEWRULE ? NLM_F_CREATE | NLM_F_EXCL : 0, &body, sizeof body);
	attribute(changes, FRA_PRIORITY, &priority, sizeof priority);
	attribute(changes, FRA_IP_PROTO, &protocol, sizeof protocol);
}

static void address(struct changes *changes, uint16_t type, uint8_t family, const void *value, uint8_t size)
{
	struct ifaddrmsg body = {.ifa_family = family,
				 .ifa_prefixlen = (uint8_t)(size * 8),
				 .ifa_flags = family == AF_INET6 ? IFA_F_NODAD : 0,
				 .ifa_scope = RT_SCOPE_UNIVERSE,
				 .ifa_index = LOOPBACK};

	change(changes, type, type == RTM_NEWADDR ? NLM_F_CREATE | NLM_F_REPLACE : 0, &body, sizeof body);
	attribute(changes, IFA_LOCAL, value, size);
	attribute(changes, IFA_ADDRESS, value, size);
}

static int lay_routes(bool open)
{
	const uint32_t self = htonl(ADDRESS_SELF), resolver = htonl(ADDRESS_RESOLVER);
	const uint16_t self6[8] = {htons(SELF_FIRST), htons(SELF_SECOND), htons(SELF_THIRD), 0, 0, 0, 0, htons(1)};
	struct changes changes = {.size = 0};

	if (open) {
		address(&changes, RTM_NEWADDR, AF_INET, &self, sizeof self);
		address(&changes, RTM_NEWADDR, AF_INET, &resolver, sizeof resolver);
		route(&changes, RTM_NEWROUTE, RTN_LOCAL, 0, 0, AF_INET);
		route(&changes, RTM_NEWROUTE, RTN_UNREACHABLE, 0xa9fe0000u, 16, AF_INET);
		route(&changes, RTM_NEWROUTE, RTN_LOCAL, ADDRESS_HOST, 32, AF_INET);
		rule(&changes, RTM_NEWRULE, AF_INET);
	} else {
		rule(&changes, RTM_DELRULE, AF_INET);
		address(&changes, RTM_DELADDR, AF_INET, &self, sizeof self);
		address(&changes, RTM_DELADDR, AF_INET, &resolver, sizeof resolver);
	}
	if (ipv6) {
		address(&changes, open ? RTM_NEWADDR : RTM_DELADDR, AF_INET6, self6, sizeof self6);
		if (open)
			route(&changes, RTM_NEWROUTE, RTN_LOCAL, 0, 0, AF_INET6);
		rule(&changes, open ? RTM_NEWRULE : RTM_DELRULE, AF_INET6);
	}
	return apply(&changes, !open);
}

/* --- The program at the lookup of sockets ------------------------------------------------------------- */

static int bpf(int command, union bpf_attr *attributes)
{
	long result = syscall(SYS_bpf, command, attributes, sizeof *attributes);

	return result < 0 ? -errno : (int)result;
}

/* A map that holds the listener: programs know sockets by such. */
static int map_of(int listener)
{
	uint32_t key = 0;
	uint64_t value = (uint64_t)listener;
	union bpf_attr attributes;

	memset(&attributes, 0, sizeof attributes);
	attributes.map_type = BPF_MAP_TYPE_SOCKMAP;
	attributes.key_size = sizeof key;
	attributes.value_size = sizeof value;
	attributes.max_entries = 1;
	int map = bpf(BPF_MAP_CREATE, &attributes);
	if (map < 0)
		return map;
	memset(&attributes, 0, sizeof attributes);
	attributes.map_fd = (uint32_t)map;
	attributes.key = (uintptr_t)&key;
	attributes.value = (uintptr_t)&value;
	int error = bpf(BPF_MAP_UPDATE_ELEM, &attributes);
	if (error) {
		close(map);
		return error;
	}
	return map;
}

#define OP(code_, to, from, offset, value) {.code = (code_), .dst_reg = (to), .src_reg = (from), .off = (offset), .imm = (value)}
#define FIELD(to, name) OP(BPF_LDX | BPF_MEM | BPF_W, to, BPF_REG_6, offsetof(struct bpf_sk_lookup, name), 0)
#define IF_EQUAL(register, value, to) OP(BPF_JMP32 | BPF_JEQ | BPF_K, register, 0, to, value)
#define CALL(function) OP(BPF_JMP | BPF_CALL, 0, 0, 0, function)

/* Give every TCP connection to the listener, but those to the sandbox itself. */
static int program_of(int map)
{
	const int32_t self = (int32_t)htonl(ADDRESS_SELF);
	const int32_t self6 = (int32_t)htonl(SELF_FIRST << 16 | SELF_SECOND);
	const int32_t loopback = (int32_t)(htonl(0x7f000000u)), first_byte = (int32_t)htonl(0xff000000u);
	const struct bpf_insn code[] = {
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_6, BPF_REG_1, 0, 0),
		FIELD(BPF_REG_2, protocol),
		OP(BPF_JMP32 | BPF_JNE | BPF_K, BPF_REG_2, 0, 21, IPPROTO_TCP), /* → pass */
		FIELD(BPF_REG_2, family),
		IF_EQUAL(BPF_REG_2, AF_INET6, 5), /* → IPv6 */
		FIELD(BPF_REG_2, local_ip4),
		IF_EQUAL(BPF_REG_2, self, 17),
		OP(BPF_ALU | BPF_AND | BPF_K, BPF_REG_2, 0, 0, first_byte),
		IF_EQUAL(BPF_REG_2, loopback, 15),
		OP(BPF_JMP | BPF_JA, 0, 0, 3, 0),
		/* IPv6: ::1 and ours, by their first four bytes, which nothing else that is reached has */
		FIELD(BPF_REG_2, local_ip6[0]),
		IF_EQUAL(BPF_REG_2, 0, 12),
		IF_EQUAL(BPF_REG_2, self6, 11),
		OP(BPF_ST | BPF_MEM | BPF_W, BPF_REG_10, 0, -4, 0),
		OP(BPF_LD | BPF_DW | BPF_IMM, BPF_REG_1, BPF_PSEUDO_MAP_FD, 0, map),
		OP(0, 0, 0, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_2, BPF_REG_10, 0, 0),
		OP(BPF_ALU64 | BPF_ADD | BPF_K, BPF_REG_2, 0, 0, -4),
		CALL(BPF_FUNC_map_lookup_elem),
		OP(BPF_JMP | BPF_JEQ | BPF_K, BPF_REG_0, 0, 4 + 3, 0), /* no listener: refused */
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_7, BPF_REG_0, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_1, BPF_REG_6, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_2, BPF_REG_0, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_3, 0, 0, 0),
		CALL(BPF_FUNC_sk_assign),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_1, BPF_REG_7, 0, 0),
		CALL(BPF_FUNC_sk_release),
		OP(BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, SK_PASS),
		OP(BPF_JMP | BPF_EXIT, 0, 0, 0, 0),
	};
	struct bpf_insn linked[sizeof code / sizeof *code];
	const int pass = (int)(sizeof code / sizeof *code) - 2;
	union bpf_attr attributes;

	/* Every jump beyond the map's lookup leads to the same place. */
	memcpy(linked, code, sizeof code);
	for (int i = 0; i < pass; i++) {
		uint8_t class = BPF_CLASS(linked[i].code);
		if ((class == BPF_JMP || class == BPF_JMP32) && linked[i].off > 5)
			linked[i].off = (int16_t)(pass - i - 1);
	}
	memset(&attributes, 0, sizeof attributes);
	attributes.prog_type = BPF_PROG_TYPE_SK_LOOKUP;
	attributes.expected_attach_type = BPF_SK_LOOKUP;
	attributes.insns = (uintptr_t)linked;
	attributes.insn_cnt = sizeof code / sizeof *code;
	attributes.license = (uintptr_t) "GPL";
	return bpf(BPF_PROG_LOAD, &attributes);
}

static int steer(int network, int listener)
{
	AUTOCLOSE int map = map_of(listener);
	union bpf_attr attributes;

	if (map < 0)
		return map;
	AUTOCLOSE int program = program_of(map);
	if (program < 0)
		return program;
	memset(&attributes, 0, sizeof attributes);
	attributes.link_create.prog_fd = (uint32_t)program;
	attributes.link_create.target_fd = (uint32_t)network;
	attributes.link_create.attach_type = BPF_SK_LOOKUP;
	return bpf(BPF_LINK_CREATE, &attributes);
}

/* --- Sockets ------------------------------------------------------------------------------------------ */

/* One for both versions of IP, where there are both. */
static int make_listener(void)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(LISTENER_PORT)};
	struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons(LISTENER_PORT)};
	struct sockaddr *wanted = (struct sockaddr *)&any;
	socklen_t size = sizeof any;
	const int no = 0, yes = 1;
	int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (listener < 0) {
		listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		wanted = (struct sockaddr *)&any4;
		size = sizeof any4;
	} else
		setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
	if (listener < 0)
		return -errno;
	/* It answers under addresses that are not the sandbox's. The option is one for both versions. */
	int error = setsockopt(listener, IPPROTO_IP, IP_TRANSPARENT, &yes, sizeof yes) < 0 ? -errno : 0;
	if (!error && bind(listener, wanted, size) < 0)
		error = -errno;
	if (error == -EADDRINUSE) {
		any.sin6_port = any4.sin_port = 0;
		error = bind(listener, wanted, size) < 0 ? -errno : 0;
	}
	/* Urgent data may come before anybody accepts (relay.c). */
	setsockopt(listener, SOL_SOCKET, SO_OOBINLINE, &yes, sizeof yes);
	if (!error && listen(listener, BACKLOG) < 0)
		error = -errno;
	if (error)
		close(listener);
	return error ? error : listener;
}

static int make_resolver(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_port = htons(53),
				      .sin_addr.s_addr = htonl(ADDRESS_RESOLVER)};
	int resolver = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (resolver < 0 || bind(resolver, (struct sockaddr *)&address, sizeof address) == 0)
		return resolver < 0 ? -errno : resolver;
	int error = -errno;
	close(resolver);
	return error;
}

int network_open(int network, int way[WAY_FDS])
{
	int error = enter(network);

	if (error)
		return error;
	for (int i = 0; i < WAY_FDS; i++)
		way[i] = -1;
	error = lay_routes(true);
	if (!error && (way[WAY_LISTENER] = make_listener()) < 0)
		error = way[WAY_LISTENER];
	if (!error && (way[WAY_RESOLVER] = make_resolver()) < 0)
		error = way[WAY_RESOLVER];
	if (!error && (way[WAY_PROGRAM] = steer(network, way[WAY_LISTENER])) < 0)
		error = way[WAY_PROGRAM];
	if (error) {
		lay_routes(false);
		for (int i = 0; i < WAY_FDS; i++)
			close_fd(&way[i]);
	}
	come_back();
	return error;
}

void network_close(int network)
{
	if (enter(network) == 0) {
		lay_routes(false);
		come_back();
	}
}

struct errand {
	int network, family, made;
};

/* Without root there is no way back from there: a child does it then. */
static int make_socket(void *argument)
{
	struct errand *errand = argument;
	int error = errand->network < 0 ? 0 : enter(errand->network);

	if (error)
		return -error;
	errand->made = socket(errand->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return errand->made < 0 ? errno : 0;
}

int network_connect(int network, uint16_t port, int ipv6_only)
{
	struct sockaddr_in server = {.sin_family = AF_INET,
				     .sin_port = htons(port),
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr_in6 server6 = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	const struct sockaddr *address = ipv6_only ? (struct sockaddr *)&server6 : (struct sockaddr *)&server;
	struct errand errand = {.network = network, .family = address->sa_family, .made = -1};
	int error = host.rootless ? run_child(make_socket, &errand, -1) : -make_socket(&errand);
	int made = errand.made;

	if (!host.rootless)
		come_back();
	/* A socket belongs to the network that it was made in, wherever it is used. */
	if (!error && connect(made, address, ipv6_only ? sizeof server6 : sizeof server) < 0 && errno != EINPROGRESS) {
		error = -errno;
		close(made);
	}
	return error ? error : made;
}
