#define _GNU_SOURCE
#include "policy.h"

#include "network.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

static struct rule rule_at(const struct policy *policy, size_t at)
{
	struct rule rule;

	memcpy(&rule, policy->rules + at, sizeof rule);
	return rule;
}

static bool sound(const struct policy *policy)
{
	size_t at = 0;

	for (uint32_t i = 0; i < policy->head.rules; i++) {
		if (policy->size - at < sizeof(struct rule))
			return false;
		struct rule rule = rule_at(policy, at);
		at += sizeof rule;
		if (rule.kind < RULE_ADDRESS || rule.kind > RULE_HOST || rule.prefix > 128 ||
		    rule.name_size > NAME_MAX_ || rule.name_size > policy->size - at)
			return false;
		at += rule.name_size;
	}
	return at == policy->size;
}

int policy_take(struct policy *policy, const void *body, size_t size)
{
	if (size < sizeof policy->head)
		return -EPROTO;
	memcpy(&policy->head, body, sizeof policy->head);
	policy->size = size - sizeof policy->head;
	if (policy->head.rules > RULES_MAX || policy->head.resolvers > RESOLVERS_MAX)
		return -EPROTO;
	policy->rules = malloc(policy->size + 1);
	policy->learnt = calloc(LEARNT_MAX, sizeof *policy->learnt);
	int error = policy->rules && policy->learnt ? 0 : -ENOMEM;
	if (!error) {
		memcpy(policy->rules, (const char *)body + sizeof policy->head, policy->size);
		error = sound(policy) ? 0 : -EPROTO;
	}
	if (error)
		policy_drop(policy);
	return error;
}

void policy_drop(struct policy *policy)
{
	free(policy->rules);
	free(policy->learnt);
	memset(policy, 0, sizeof *policy);
}

/* IPv4: this network, loopback, link-local, multicast and what is reserved; ourselves; and the services of
 * clouds for their machines that are not link-local (Alibaba's and Oracle's metadata, Azure's wire server). */
static bool never_v4(const uint8_t *a)
{
	uint32_t number = (uint32_t)a[0] << 24 | (uint32_t)a[1] << 16 | (uint32_t)a[2] << 8 | a[3];

	return a[0] == 0 || a[0] == 127 || a[0] >= 224 || number >> 16 == 0xa9fe || number == ADDRESS_SELF ||
	       number == 0x646464c8u || number == 0xa83f8110u || number == 0xc00000c0u;
}

/* The host, what lies on its links, and what is no destination: whatever the rules say. The host's other
 * addresses are known to its routes, and refused by whoever connects. */
static bool never(const struct in6_addr *address)
{
	const uint8_t *a = address->s6_addr;
	uint32_t first = (uint32_t)a[0] << 24 | (uint32_t)a[1] << 16 | (uint32_t)a[2] << 8 | a[3];

	if (IN6_IS_ADDR_V4MAPPED(address))
		return never_v4(a + 12);
	switch (first) {
	case 0: /* the loopback, none, and forms of IPv4 that nobody routes */
	case SELF_FIRST << 16 | SELF_SECOND:
	case 0xfd000ec2u: /* metadata: Amazon's */
	case 0xfd2000ceu: /* and Google's */
		return true;
	case 0x0064ff9bu: /* IPv4 behind a translator */
		return never_v4(a + 12);
	}
	return a[0] == 0xff || (a[0] == 0xfe && (a[1] & 0xc0) == 0x80);
}

static bool is_v4(const struct in6_addr *address, uint32_t number)
{
	uint32_t found;

	memcpy(&found, address->s6_addr + 12, sizeof found);
	return IN6_IS_ADDR_V4MAPPED(address) && ntohl(found) == number;
}

static bool begins(const uint8_t *address, const uint8_t *prefix, unsigned bits)
{
	unsigned whole = bits / 8, rest = bits % 8;

	if (memcmp(address, prefix, whole) != 0)
		return false;
	return !rest || ((address[whole] ^ prefix[whole]) >> (8 - rest)) == 0;
}

static bool port_fits(uint16_t wanted, uint16_t port)
{
	return wanted == 0 || wanted == port;
}

enum verdict_kind policy_judge(const struct policy *policy, const struct in6_addr *address, uint16_t port, uint64_t moment)
{
	bool all = policy->head.flags & NETWORK_ALL, host = is_v4(address, ADDRESS_HOST);
	size_t at = 0;

	/* By TCP nobody looks at the names that are asked for. */
	if (is_v4(address, ADDRESS_RESOLVER) && port == 53 && all && policy->head.resolvers)
		return ALLOWED_RESOLVER;
	if (host && all)
		return ALLOWED_HOST;
	if (!host && never(address))
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
		if (!host && rule.kind == RULE_ADDRESS && begins(address->s6_addr, rule.address, rule.prefix))
			return ALLOWED;
	}
	for (unsigned i = 0; !host && i < LEARNT_MAX; i++) {
		const struct learnt *learnt = &policy->learnt[i];
		if (learnt->until > moment && port_fits(learnt->port, port) &&
		    memcmp(&learnt->address, address, sizeof *address) == 0)
			return ALLOWED;
	}
	return REFUSED;
}

static bool names(const struct policy *policy, size_t at, const struct rule *rule, const char *name, size_t size)
{
	const char *wanted = (const char *)policy->rules + at + sizeof *rule;
	size_t length = rule->name_size;

	if (rule->kind == RULE_NAME)
		return size == length && memcmp(name, wanted, size) == 0;
	if (rule->kind != RULE_BELOW)
		return false;
	return length == 0 ||
	       (size > length + 1 && name[size - length - 1] == '.' && memcmp(name + size - length, wanted, length) == 0);
}

bool policy_allows_name(const struct policy *policy, const char *name, size_t size)
{
	size_t at = 0;

	if (policy->head.flags & NETWORK_ALL)
		return true;
	for (uint32_t i = 0; i < policy->head.rules; i++) {
		struct rule rule = rule_at(policy, at);
		if (names(policy, at, &rule, name, size))
			return true;
		at += sizeof rule + rule.name_size;
	}
	return false;
}

static void learn(struct policy *policy, const struct in6_addr *address, uint16_t port, uint64_t until)
{
	for (unsigned i = 0; i < LEARNT_MAX; i++) {
		struct learnt *known = &policy->learnt[i];
		if (known->until && known->port == port && memcmp(&known->address, address, sizeof *address) == 0) {
			known->until = until > known->until ? until : known->until;
			return;
		}
	}
	policy->learnt[policy->next++ % LEARNT_MAX] = (struct learnt){*address, port, until};
}

void policy_learn(struct policy *policy, const char *name, size_t size, const struct in6_addr *address, uint64_t until)
{
	size_t at = 0;

	for (uint32_t i = 0; i < policy->head.rules; i++) {
		struct rule rule = rule_at(policy, at);
		if (names(policy, at, &rule, name, size))
			learn(policy, address, rule.port, until);
		at += sizeof rule + rule.name_size;
	}
}
