/* Network policies. The input is two bytes of size, a port, an address, a policy of that size, and a name. */
#include "egress/policy.h"
#include "jail.h"

#include <string.h>

struct tried {
	uint16_t port;
	struct in6_addr address;
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct policy policy = {.size = 0};
	struct tried probe;
	uint16_t first;

	if (size < sizeof first + sizeof probe)
		return 0;
	memcpy(&first, data, sizeof first);
	memcpy(&probe.port, data + 2, sizeof probe.port);
	memcpy(&probe.address, data + 4, sizeof probe.address);
	data += 20;
	size -= 20;
	if (first > size)
		first = (uint16_t)size;
	if (policy_parse(&policy, data, first) < 0) {
		require(!policy.rules && !policy.resolved, "a refused policy is freed");
		return 0;
	}
	const char *name = (const char *)data + first;
	size_t length = size - first < DOMAIN_MAX ? size - first : DOMAIN_MAX;
	enum policy_verdict before = policy_check(&policy, &probe.address, probe.port, 1);
	if (policy_allows_name(&policy, name, length)) {
		policy_add_resolved(&policy, name, length, &probe.address, 100);
		policy_check(&policy, &probe.address, probe.port, 1);
	}
	require(policy_check(&policy, &probe.address, probe.port, 1000) == before, "resolved addresses expire");
	/* An address that embeds a denylisted address is refused, whatever the rules say. */
	struct in6_addr inner[EMBEDDED_MAX];
	unsigned count = policy_embedded(&probe.address, inner);
	require(count <= EMBEDDED_MAX, "no more embedded addresses than fit");
	for (unsigned i = 0; i < count && before == ALLOWED; i++)
		require(IN6_IS_ADDR_V4MAPPED(&inner[i]) && !policy_denylisted(&inner[i]),
			"an allowed address embeds no denylisted one");
	policy_free(&policy);
	return 0;
}
