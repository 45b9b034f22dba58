/* What a sandbox may reach: a policy (a size of two bytes, and that many), a port, an address, and a name. */
#define _GNU_SOURCE
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
	struct tried tried;
	uint16_t first;

	if (size < sizeof first + sizeof tried)
		return 0;
	memcpy(&first, data, sizeof first);
	memcpy(&tried.port, data + 2, sizeof tried.port);
	memcpy(&tried.address, data + 4, sizeof tried.address);
	data += 20;
	size -= 20;
	if (first > size)
		first = (uint16_t)size;
	if (policy_take(&policy, data, first) < 0) {
		claim(!policy.rules && !policy.learnt, "what is refused leaves nothing");
		return 0;
	}
	const char *name = (const char *)data + first;
	size_t length = size - first < NAME_MAX_ ? size - first : NAME_MAX_;
	enum verdict_kind before = policy_judge(&policy, &tried.address, tried.port, 1);
	if (policy_allows_name(&policy, name, length)) {
		policy_learn(&policy, name, length, &tried.address, 100);
		policy_judge(&policy, &tried.address, tried.port, 1);
	}
	claim(policy_judge(&policy, &tried.address, tried.port, 1000) == before, "what was learnt is forgotten in time");
	/* What leads to an address that nobody reaches is not reached either, whatever the rules say. */
	struct in6_addr inner[EMBEDDED_MAX];
	unsigned count = policy_embedded(&tried.address, inner);
	claim(count <= EMBEDDED_MAX, "as many as there is room for");
	for (unsigned i = 0; i < count && before == ALLOWED; i++)
		claim(IN6_IS_ADDR_V4MAPPED(&inner[i]) && !policy_never(&inner[i]), "nor by a tunnel");
	policy_drop(&policy);
	return 0;
}
