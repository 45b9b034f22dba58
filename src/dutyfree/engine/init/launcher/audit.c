/* Audit: what the launcher checks of a sandbox from outside, where no process inside can fake it. Its limits in the
 * kernel, its POSIX message queues, and the memory that it uses. */
#include "launcher/cgroup.h"
#include "launcher/host.h"
#include "launcher/sandboxes.h"
#include "sys.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NO_LIMIT (1ull << 62) /* from here on, cgroup v1 means "no limit" */

/* Whether the kernel has the limit that was asked for, 0 for none. The kernel rounds down, by less than `rounding`. */
static bool limit_matches(const struct cgroup *group, int kind, const char *file, uint64_t expected, uint64_t rounding)
{
	char text[64];
	ssize_t size = cgroup_read(group, kind, file, text, sizeof text);

	if (size == -EOPNOTSUPP) /* this host has no such controller, so no limit was promised */
		return true;
	uint64_t found = size > 0 && isdigit(text[0]) ? strtoull(text, NULL, 10) : NO_LIMIT;
	if (size <= 0 || found >= NO_LIMIT)
		return size > 0 && !expected;
	return expected >= found && expected - found < rounding;
}

static bool limits_match(const struct cgroup *group)
{
	bool v2 = cgroup_is_v2();
	char weight[32];
	uint64_t pids = group->pids ? group->pids + (v2 ? 0 : 1) : 0; /* as in cgroup_set_limits */
	ssize_t size = cgroup_read(group, CGROUP_CPU, v2 ? "cpu.weight" : "cpu.shares", weight, sizeof weight);

	return limit_matches(group, CGROUP_MEMORY, v2 ? "memory.max" : "memory.limit_in_bytes", group->memory,
		      (uint64_t)sysconf(_SC_PAGESIZE)) &&
	       limit_matches(group, CGROUP_PIDS, "pids.max", pids, 1) &&
	       limit_matches(group, CGROUP_CPU, v2 ? "cpu.max" : "cpu.cfs_quota_us", group->cpu_quota, 1) &&
	       (size == -EOPNOTSUPP ||
		(size > 0 && atoi(weight) == atoi(v2 ? CGROUP_WEIGHT_V2 : CGROUP_WEIGHT_V1)));
}

/* The number of one line "name number". */
static uint64_t stat_value(const char *list, const char *name)
{
	size_t size = strlen(name);

	for (const char *line = list; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
		if (strncmp(line, name, size) == 0 && line[size] == ' ')
			return strtoull(line + size, NULL, 10);
	return 0;
}

static uint64_t memory_used(const struct cgroup *group)
{
	char list[8192];

	if (cgroup_read(group, CGROUP_MEMORY, "memory.stat", list, sizeof list) <= 0)
		return 0;
	return stat_value(list, cgroup_is_v2() ? "anon" : "rss") + stat_value(list, "shmem");
}

void sandbox_audit(const struct request *request)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	struct {
		struct audit_result result;
		char text[64];
	} answer = {.text = ""};

	if (!sandbox || sandbox->ended) {
		refuse(request->serial, -ESRCH, "the sandbox has ended");
		return;
	}
	answer.result.memory = memory_used(&sandbox->slot->cgroup);
	/* Rootless: not even the launcher may enter the namespaces of a sandbox. */
	int queued = slot_has_message_queues(sandbox->slot);
	bool limited = limits_match(&sandbox->slot->cgroup), messages = queued > 0 || (queued < 0 && !host.rootless);
	snprintf(answer.text, sizeof answer.text, "%s%s%s", limited ? "" : "limits", !limited && messages ? ", " : "",
		 messages ? "message queues" : "");
	reply(request->serial, 0, sandbox->number, &answer, sizeof answer.result + strlen(answer.text), NULL, 0);
}
