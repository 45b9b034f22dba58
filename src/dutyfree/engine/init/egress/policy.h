/* The network policy of a sandbox: decides what it may reach. No sockets here, only values. */
#pragma once

#include "protocol.h"

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>

/* Addresses that allowed names resolved to, until they expire. New ones replace the oldest. */
#define RESOLVED_MAX 1024

struct resolved_address {
	struct in6_addr address;
	uint16_t port; /* 0 for all ports */
	uint64_t until;
};

struct policy {
	struct network head;
	unsigned char *rules; /* each a struct rule, then its name */
	size_t size;
	struct resolved_address *resolved;
	unsigned next;
};

enum policy_verdict { REFUSED, ALLOWED, ALLOWED_HOST /* 127.0.0.1 of the host */, ALLOWED_RESOLVER };

/* Parse what the owner sent: 0 or -errno. The policy must be zeroed or freed. */
int policy_parse(struct policy *policy, const void *body, size_t size);
void policy_free(struct policy *policy);

/* Whether denylist.h lists the address: loopback, link-local, cloud metadata, multicast. It overrides all rules. */
bool policy_denylisted(const struct in6_addr *address);
/* The IPv4 addresses that an IPv6 address embeds for a translator or tunnel, as ::ffff:…. Returns how many; 0 for an
 * address that is itself ::ffff:…. */
#define EMBEDDED_MAX 5
unsigned policy_embedded(const struct in6_addr *address, struct in6_addr found[EMBEDDED_MAX]);
enum policy_verdict policy_check(const struct policy *policy, const struct in6_addr *address, uint16_t port,
				 uint64_t moment);
bool policy_allows_name(const struct policy *policy, const char *name, size_t size);
/* An allowed name resolved to this address. */
void policy_add_resolved(struct policy *policy, const char *name, size_t size, const struct in6_addr *address,
			 uint64_t until);
