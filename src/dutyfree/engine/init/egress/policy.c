#include "egress/policy.h"

#include "egress/netns.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

static struct rule rule_at(const struct policy *policy, size_t at)
{
	struct rule rule;

	memcpy(&rule, policy->rules + at, sizeof rule);
	return rule;
}

static bool is_valid(const struct policy *policy)
{
	size_t at = 0;

	for (uint32_t i = 0; i < policy->head.rules; i++) {
		if (policy->size - at < sizeof(struct rule))
			return false;
		struct rule rule = rule_at(policy, at);
		at += sizeof rule;
		if (rule.kind < RULE_ADDRESS || rule.kind > RULE_HOST || rule.prefix > 128 ||
		    rule.name_size > DOMAIN_MAX || rule.name_size > policy->size - at)
			return false;
		at += rule.name_size;
	}
	return at == policy->size;
}

int policy_parse(struct policy *policy, const void *body, size_t size)
{
	if (size < sizeof policy->head)
		return -EPROTO;
	memcpy(&policy->head, body, sizeof policy->head);
	policy->size = size - sizeof policy->head;
	if (policy->head.rules > RULES_MAX || policy->head.resolvers > RESOLVERS_MAX)
		return -EPROTO;
	policy->rules = malloc(policy->size + 1);
	policy->resolved = calloc(RESOLVED_MAX, sizeof *policy->resolved);
	int error = policy->rules && policy->resolved ? 0 : -ENOMEM;
	if (!error) {
		memcpy(policy->rules, (const char *)body + sizeof policy->head, policy->size);
		error = is_valid(policy) ? 0 : -EPROTO;
	}
	if (error)
		policy_free(policy);
	return error;
}

void policy_free(struct policy *policy)
{
	free(policy->rules);
	free(policy->resolved);
	memset(policy, 0, sizeof *policy);
}

static bool has_prefix(const uint8_t *address, const uint8_t *prefix, unsigned bits)
{
	unsigned whole = bits / 8, rest = bits % 8;

	if (memcmp(address, prefix, whole) != 0)
		return false;
	return !rest || ((address[whole] ^ prefix[whole]) >> (8 - rest)) == 0;
}

/* --- The denylist -------------------------------------------------------------------------------- */

#define DENIED(network, why) network,
static const char *const denylist[] = {
#include "egress/denylist.h"
};
#undef DENIED
#define DENYLIST_SIZE (sizeof denylist / sizeof *denylist)

struct prefix {
	struct in6_addr address;
	unsigned bits;
	bool v4;
};

static struct prefix parse_prefix(const char *text)
{
	struct prefix prefix = {.v4 = !strchr(text, ':')};
	char address[INET6_ADDRSTRLEN];
	size_t length = strcspn(text, "/");

	if (length >= sizeof address)
		abort();
	memcpy(address, text, length);
	address[length] = 0;
	prefix.bits = (unsigned)atoi(text + length + 1) + (prefix.v4 ? 96 : 0);
	if (prefix.v4)
		memset(prefix.address.s6_addr + 10, 0xff, 2);
	if (inet_pton(prefix.v4 ? AF_INET : AF_INET6, address, prefix.address.s6_addr + (prefix.v4 ? 12 : 0)) != 1)
		abort(); /* a bug in denylist.h */
	return prefix;
}

static bool is_denylisted(const struct in6_addr *address)
{
	static struct prefix prefixes[DENYLIST_SIZE];
	bool v4 = IN6_IS_ADDR_V4MAPPED(address);

	for (size_t i = 0; !prefixes[DENYLIST_SIZE - 1].bits && i < DENYLIST_SIZE; i++)
		prefixes[i] = parse_prefix(denylist[i]);
	for (size_t i = 0; i < DENYLIST_SIZE; i++)
		if (prefixes[i].v4 == v4 && has_prefix(address->s6_addr, prefixes[i].address.s6_addr, prefixes[i].bits))
			return true;
	return false;
}

static struct in6_addr mapped(uint8_t first, uint8_t second, uint8_t third, uint8_t fourth)
{
	return (struct in6_addr){.s6_addr = {[10] = 0xff, 0xff, first, second, third, fourth}};
}

unsigned policy_embedded(const struct in6_addr *address, struct in6_addr found[EMBEDDED_MAX])
{
	const uint8_t *a = address->s6_addr;
	uint32_t first = (uint32_t)a[0] << 24 | (uint32_t)a[1] << 16 | (uint32_t)a[2] << 8 | a[3];
	unsigned count = 0;

	if (first == 0x0064ff9bu && a[4] == 0 && a[5] == 1) {
		/* Local-use NAT64 (64:ff9b:1::/48). The prefix length is unknown, so the IPv4 address can be at four
		 * places. The other bytes are zero, before or after it. */
		static const uint8_t places[][4] = {{6, 7, 9, 10}, {7, 9, 10, 11}, {9, 10, 11, 12}, {12, 13, 14, 15}};
		for (unsigned i = 0; i < sizeof places / sizeof *places; i++)
			if (a[places[i][0]] && a[places[i][3]])
				found[count++] = mapped(a[places[i][0]], a[places[i][1]], a[places[i][2]], a[places[i][3]]);
	} else if (first == 0x0064ff9bu) /* NAT64 */
		found[count++] = mapped(a[12], a[13], a[14], a[15]);
	else if (first >> 16 == 0x2002) /* 6to4 */
		found[count++] = mapped(a[2], a[3], a[4], a[5]);
	else if (first == 0x20010000u) { /* Teredo: the server, and the client with inverted bits */
		found[count++] = mapped(a[4], a[5], a[6], a[7]);
		found[count++] = mapped((uint8_t)~a[12], (uint8_t)~a[13], (uint8_t)~a[14], (uint8_t)~a[15]);
	}
	if ((a[8] & ~2) == 0 && a[9] == 0 && a[10] == 0x5e && a[11] == 0xfe && first) /* ISATAP */
		found[count++] = mapped(a[12], a[13], a[14], a[15]);
	return count;
}

bool policy_denylisted(const struct in6_addr *address)
{
	struct in6_addr inner[EMBEDDED_MAX];

	if (is_denylisted(address))
		return true;
	for (unsigned count = policy_embedded(address, inner); count > 0; count--)
		if (is_denylisted(&inner[count - 1]))
			return true;
	return false;
}

/* --- Policy checks ------------------------------------------------------------------------------- */

static bool is_v4(const struct in6_addr *address, uint32_t number)
{
	uint32_t found;

	memcpy(&found, address->s6_addr + 12, sizeof found);
	return IN6_IS_ADDR_V4MAPPED(address) && ntohl(found) == number;
}

static bool port_fits(uint16_t rule_port, uint16_t port)
{
	return rule_port == 0 || rule_port == port;
}

enum policy_verdict policy_check(const struct policy *policy, const struct in6_addr *address, uint16_t port,
				 uint64_t moment)
{
	bool all = policy->head.flags & NETWORK_ALL, host = is_v4(address, ADDRESS_HOST);
	size_t at = 0;

	/* DNS over TCP is not parsed, so only policy "on" may use it. */
	if (is_v4(address, ADDRESS_RESOLVER) && port == 53 && all && policy->head.resolvers)
		return ALLOWED_RESOLVER;
	if (host && all)
		return ALLOWED_HOST;
	if (!host && policy_denylisted(address))
		return REFUSED;
	if (all)
		return ALLOWED;
	for (uint32_t i = 0; i < policy->head.rules; i++) {
		struct rule rule = rule_at(policy, at);
		at += sizeof rule + rule.name_size;
		if (!port_fits(rule.port, port))
			continue;
		if (host && rule.kind == RULE_HOST)
			return ALLOWED_HOST;
		if (!host && rule.kind == RULE_ADDRESS && has_prefix(address->s6_addr, rule.address, rule.prefix))
			return ALLOWED;
	}
	for (unsigned i = 0; !host && i < RESOLVED_MAX; i++) {
		const struct resolved_address *resolved = &policy->resolved[i];
		if (resolved->until > moment && port_fits(resolved->port, port) &&
		    memcmp(&resolved->address, address, sizeof *address) == 0)
			return ALLOWED;
	}
	return REFUSED;
}

static bool name_matches(const struct policy *policy, size_t at, const struct rule *rule, const char *name, size_t size)
{
	const char *rule_name = (const char *)policy->rules + at + sizeof *rule;
	size_t length = rule->name_size;

	if (rule->kind == RULE_NAME)
		return size == length && memcmp(name, rule_name, size) == 0;
	if (rule->kind != RULE_SUBDOMAINS)
		return false;
	return length == 0 ||
	       (size > length + 1 && name[size - length - 1] == '.' && memcmp(name + size - length, rule_name, length) == 0);
}

bool policy_allows_name(const struct policy *policy, const char *name, size_t size)
{
	size_t at = 0;

	if (policy->head.flags & NETWORK_ALL)
		return true;
	for (uint32_t i = 0; i < policy->head.rules; i++) {
		struct rule rule = rule_at(policy, at);
		if (name_matches(policy, at, &rule, name, size))
			return true;
		at += sizeof rule + rule.name_size;
	}
	return false;
}

static void add_resolved(struct policy *policy, const struct in6_addr *address, uint16_t port, uint64_t until)
{
	for (unsigned i = 0; i < RESOLVED_MAX; i++) {
		struct resolved_address *known = &policy->resolved[i];
		if (known->until && known->port == port && memcmp(&known->address, address, sizeof *address) == 0) {
			known->until = until > known->until ? until : known->until;
			return;
		}
	}
	policy->resolved[policy->next++ % RESOLVED_MAX] = (struct resolved_address){*address, port, until};
}

void policy_add_resolved(struct policy *policy, const char *name, size_t size, const struct in6_addr *address,
			 uint64_t until)
{
	size_t at = 0;

	for (uint32_t i = 0; i < policy->head.rules; i++) {
		struct rule rule = rule_at(policy, at);
		if (name_matches(policy, at, &rule, name, size))
			add_resolved(policy, address, rule.port, until);
		at += sizeof rule + rule.name_size;
	}
}
