/* What a sandbox may reach: decided here, from values alone. */
#ifndef DUTYFREE_POLICY_H
#define DUTYFREE_POLICY_H

#include "protocol.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>

/* Addresses that allowed names led to, each until its time is over. The oldest make room for new ones. */
#define RESOLVED_MAX 1024

struct resolved_address {
	struct in6_addr address;
	uint16_t port; /* 0 for all */
	uint64_t until;
};

struct policy {
	struct network head;
	unsigned char *rules; /* each a struct rule and its name */
	size_t size;
	struct resolved_address *resolved;
	unsigned next;
};

enum policy_verdict { REFUSED, ALLOWED, ALLOWED_HOST /* its loopback */, ALLOWED_RESOLVER };

/* Takes what the owner sent: 0 or -errno. The policy must be zero, or one that policy_drop was called on. */
int policy_parse(struct policy *policy, const void *body, size_t size);
void policy_free(struct policy *policy);

/* The host, what lies on its links, metadata services of clouds, and what is no destination: whatever the rules say. */
bool policy_denylisted(const struct in6_addr *address);
/* The IPv4 addresses that an IPv6 address carries for a translator or a tunnel, as ::ffff:…. Returns how many: none
 * of an address that is itself ::ffff:…. */
#define EMBEDDED_MAX 5
unsigned policy_embedded(const struct in6_addr *address, struct in6_addr found[EMBEDDED_MAX]);
enum policy_verdict policy_check(const struct policy *policy, const struct in6_addr *address, uint16_t port, uint64_t moment);
bool policy_allows_name(const struct policy *policy, const char *name, size_t size);
/* The name, which is allowed, led to an address. */
void policy_add_resolved(struct policy *policy, const char *name, size_t size, const struct in6_addr *address, uint64_t until);

#endif
