/* Addresses, routes and rules of a sandbox's network namespace: all TCP goes to its loopback, everything else is
 * unreachable. */
#include "egress/netns.h"

#include "sys.h"

#include <arpa/inet.h>
#include <linux/fib_rules.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define TABLE 100    /* routing table number */
#define PRIORITY 100 /* of the rule, after the local table */
#define LOOPBACK 1   /* index of the loopback interface */

/* Several netlink messages in one send(). */
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
			const struct nlmsgerr *report = NLMSG_DATA(at);
			if (at->nlmsg_type == NLMSG_ERROR && report->error && !error)
				error = report->error;
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

/* Only TCP. Other protocols have no route, so programs see an error at once. */
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

int routes_configure(bool open, bool ipv6)
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
