/* What the launcher sees of a sandbox, where those in it cannot see or say otherwise: its limits as the kernel has
 * them, its message queues, and the memory that it takes. */
#define _GNU_SOURCE
#include "launcher/sandboxes.h"
#include "launcher/cgroup.h"
#include "launcher/host.h"
#include "sys.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NO_LIMIT (1ull << 62) /* from here on, version 1 means none */

/* Whether a limit is as it was asked for, 0 for none; what the kernel rounds, it rounds down, by less than `grain`. */
static bool stands(const struct cgroup *group, int kind, const char *file, uint64_t wanted, uint64_t grain)
{
	char text[64];
	ssize_t size = cgroup_read(group, kind, file, text, sizeof text);

	if (size == -EOPNOTSUPP) /* nobody limits it here, and nobody was told so */
		return true;
	uint64_t found = size > 0 && isdigit(text[0]) ? strtoull(text, NULL, 10) : NO_LIMIT;
	if (size <= 0 || found >= NO_LIMIT)
		return size > 0 && !wanted;
	return wanted >= found && wanted - found < grain;
}

static bool limits_stand(const struct cgroup *group)
{
	bool unified = cgroup_unified();
	char weight[32];
	uint64_t pids = group->pids ? group->pids + (unified ? 0 : 1) : 0; /* as cgroup_limit has it */
	ssize_t size = cgroup_read(group, CGROUP_CPU, unified ? "cpu.weight" : "cpu.shares", weight, sizeof weight);

	return stands(group, CGROUP_MEMORY, unified ? "memory.max" : "memory.limit_in_bytes", group->memory,
		      (uint64_t)sysconf(_SC_PAGESIZE)) &&
	       stands(group, CGROUP_PIDS, "pids.max", pids, 1) &&
	       stands(group, CGROUP_CPU, unified ? "cpu.max" : "cpu.cfs_quota_us", group->cpu_quota, 1) &&
	       (size == -EOPNOTSUPP ||
		(size > 0 && atoi(weight) == atoi(unified ? CGROUP_FULL_UNIFIED : CGROUP_FULL)));
}

/* One number of a list with a name and a number on each line. */
static uint64_t listed(const char *list, const char *name)
{
	size_t size = strlen(name);

	for (const char *line = list; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL)
		if (strncmp(line, name, size) == 0 && line[size] == ' ')
			return strtoull(line + size, NULL, 10);
	return 0;
}

static uint64_t memory_of(const struct cgroup *group)
{
	char list[8192];

	if (cgroup_read(group, CGROUP_MEMORY, "memory.stat", list, sizeof list) <= 0)
		return 0;
	return listed(list, cgroup_unified() ? "anon" : "rss") + listed(list, "shmem");
}

void box_look(const struct request *request)
{
	struct box *box = box_of(request->number);
	struct {
		struct seen seen;
		char text[64];
	} answer = {.text = ""};

	if (!box || box->ended) {
		refuse(request->serial, -ESRCH, "sandbox");
		return;
	}
	answer.seen.memory = memory_of(&box->slot->cgroup);
	/* Without root nobody, not even us, may look into a sandbox's namespaces. */
	int kept = slot_keeps_messages(box->slot);
	bool limited = limits_stand(&box->slot->cgroup), messages = kept > 0 || (kept < 0 && !host.rootless);
	snprintf(answer.text, sizeof answer.text, "%s%s%s", limited ? "" : "limits", !limited && messages ? ", " : "",
		 messages ? "message queues" : "");
	reply(request->serial, 0, box->number, &answer, sizeof answer.seen + strlen(answer.text), NULL, 0);
}
