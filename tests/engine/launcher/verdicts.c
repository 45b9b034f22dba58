/* For each address on stdin, print whether a sandbox with the policy "on" may reach it. */
#include "egress/policy.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
	struct policy policy = {.head = {.flags = NETWORK_ALL}};
	char line[100];

	while (fgets(line, sizeof line, stdin)) {
		struct in6_addr address = {.s6_addr = {[10] = 0xff, [11] = 0xff}};
		line[strcspn(line, "\n")] = 0;
		int family = strchr(line, ':') ? AF_INET6 : AF_INET;
		if (inet_pton(family, line, address.s6_addr + (family == AF_INET ? 12 : 0)) != 1)
			return 1;
		puts(policy_check(&policy, &address, 80, 1) == ALLOWED ? "allowed" : "refused");
	}
	return 0;
}
