#define _GNU_SOURCE
#include "cgroup.h"

#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

static const char *const names[CGROUP_KINDS] = {"cpu", "memory", "pids"};
static const char prefix[] = "dutyfree-";

/* Where our group is made, and our group: by controller on version 1, all the same on version 2. */
static int parents[CGROUP_PLACES] = {-1, -1, -1, -1}, ours[CGROUP_PLACES] = {-1, -1, -1, -1};
static bool unified;
static char name[32];

static bool listed(const char *list, const char *word, char separator)
{
	size_t size = strlen(word);

	for (const char *at = list; at && *at; at = strchr(at, separator), at = at ? at + 1 : NULL)
		if (strncmp(at, word, size) == 0 && (at[size] == separator || !at[size] || at[size] == '\n'))
			return true;
	return false;
}

/* Our place in a hierarchy of version 1, from /proc/self/cgroup. */
static void own_path(const char *groups, const char *controller, char *path, size_t size)
{
	snprintf(path, size, "/");
	for (const char *line = groups; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
		char list[128], found[512];
		if (sscanf(line, "%*d:%127[^:]:%511[^\n]", list, found) == 2 && listed(list, controller, ','))
			snprintf(path, size, "%s", found);
	}
}

static void find(const char *mounts, const char *groups)
{
	char root[512], point[512], type[32], options[256], path[1100], place[512];
	int unified_mount = -1;

	for (const char *line = mounts; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
		const char *rest = strstr(line, " - ");
		if (sscanf(line, "%*d %*d %*s %511s %511s", root, point) != 2 || !rest ||
		    sscanf(rest, " - %31s %*s %255s", type, options) != 2)
			continue;
		if (strcmp(type, "cgroup2") == 0 && unified_mount < 0)
			unified_mount = open(point, O_PATH | O_DIRECTORY | O_CLOEXEC);
		for (int kind = 0; kind < CGROUP_KINDS && strcmp(type, "cgroup") == 0; kind++) {
			if (parents[kind] >= 0 || !listed(options, names[kind], ','))
				continue;
			own_path(groups, names[kind], place, sizeof place);
			/* A container sees its own group as the root of the mount. */
			const char *below = strncmp(place, root, strlen(root)) == 0 ? place + strlen(root) : "";
			snprintf(path, sizeof path, "%s/%s", point, strcmp(root, "/") == 0 ? place : below);
			parents[kind] = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
		}
	}
	/* Version 2 serves if version 1 has none of them; at its root, for inner groups may hold no process. */
	if (unified_mount >= 0 && parents[0] < 0 && parents[1] < 0 && parents[2] < 0) {
		unified = true;
		for (int kind = 0; kind < CGROUP_KINDS; kind++)
			parents[kind] = unified_mount;
	}
	/* Beside version 1, version 2 serves to freeze. A host that has not mounted it has it all the same. */
	parents[CGROUP_FREEZER] = unified_mount >= 0 ? unified_mount : mount_new("cgroup2", NULL, 0);
}

/* Remove a group of groups, of which all processes are gone or going. */
static void sweep(int parent, const char *group, int patience_ms)
{
	int fd = openat(parent, group, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	for (struct dirent *entry; dir && (entry = readdir(dir));)
		while (entry->d_type == DT_DIR && entry->d_name[0] == 's' && patience_ms >= 0 &&
		       unlinkat(fd, entry->d_name, AT_REMOVEDIR) < 0 && errno == EBUSY && patience_ms-- > 0)
			usleep(1000);
	if (dir)
		closedir(dir);
	while (unlinkat(parent, group, AT_REMOVEDIR) < 0 && errno == EBUSY && patience_ms-- > 0)
		usleep(1000);
}

static void sweep_dead(int parent)
{
	int fd = openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	for (struct dirent *entry; dir && (entry = readdir(dir));) {
		if (strncmp(entry->d_name, prefix, sizeof prefix - 1) != 0)
			continue;
		int owner = atoi(entry->d_name + sizeof prefix - 1);
		if (owner > 0 && kill(owner, 0) < 0 && errno == ESRCH)
			sweep(parent, entry->d_name, 0);
	}
	if (dir)
		closedir(dir);
}

int cgroup_open(int proc)
{
	static char mounts[65536], groups[8192];
	struct sysinfo info;
	char limit[32];

	if (read_file(proc, "self/mountinfo", mounts, sizeof mounts) < 0 ||
	    read_file(proc, "self/cgroup", groups, sizeof groups) < 0)
		return -errno;
	find(mounts, groups);
	snprintf(name, sizeof name, "%s%d", prefix, getpid());
	if (unified)
		write_file(parents[0], "cgroup.subtree_control", "+cpu +memory +pids");
	for (int kind = 0; kind < CGROUP_PLACES; kind++) {
		if (parents[kind] < 0)
			continue;
		sweep_dead(parents[kind]);
		if (mkdirat(parents[kind], name, 0755) < 0 && errno != EEXIST) {
			if (kind == CGROUP_FREEZER)
				break; /* one can do without */
			return -errno;
		}
		ours[kind] = openat(parents[kind], name, O_PATH | O_DIRECTORY | O_CLOEXEC);
	}
	if (unified)
		write_file(ours[0], "cgroup.subtree_control", "+cpu +memory +pids");
	/* All sandboxes together leave the host a tenth of its memory, so that no bomb reaches beyond them. */
	if (ours[CGROUP_MEMORY] >= 0 && sysinfo(&info) == 0) {
		uint64_t total = (uint64_t)info.totalram * info.mem_unit;
		snprintf(limit, sizeof limit, "%llu", (unsigned long long)(total - total / 10));
		write_file(ours[CGROUP_MEMORY], unified ? "memory.max" : "memory.limit_in_bytes", limit);
	}
	/* And a quarter of its process numbers. */
	if (ours[CGROUP_PIDS] >= 0 && read_file(proc, "sys/kernel/pid_max", limit, sizeof limit) > 0) {
		snprintf(limit, sizeof limit, "%llu", strtoull(limit, NULL, 10) / 4 * 3);
		write_file(ours[CGROUP_PIDS], "pids.max", limit);
	}
	return 0;
}

void cgroup_describe(char *text, size_t size)
{
	int used = snprintf(text, size, "cgroup=%s", unified ? "v2" : "v1");

	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (ours[kind] >= 0 && used > 0 && (size_t)used < size)
			used += snprintf(text + used, size - (size_t)used, ":%s", names[kind]);
	if (ours[CGROUP_FREEZER] >= 0 && used > 0 && (size_t)used < size)
		snprintf(text + used, size - (size_t)used, ":freezer");
}

int cgroup_make(struct cgroup *group, unsigned number)
{
	char path[64];

	*group = (struct cgroup){.number = number, .unified = unified, .directory = -1, .tasks = {-1, -1, -1}};
	snprintf(path, sizeof path, "s%u", number);
	for (int kind = 0; kind < CGROUP_PLACES; kind++)
		if (ours[kind] >= 0 && mkdirat(ours[kind], path, 0755) < 0 && errno != EEXIST)
			return -errno;
	if (ours[CGROUP_FREEZER] >= 0) {
		group->directory = openat(ours[CGROUP_FREEZER], path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (group->directory < 0)
			return -errno;
	}
	if (unified)
		return 0;
	snprintf(path, sizeof path, "s%u/tasks", number);
	for (int kind = 0; kind < CGROUP_KINDS; kind++) {
		if (ours[kind] < 0)
			continue;
		group->tasks[kind] = openat(ours[kind], path, O_WRONLY | O_CLOEXEC);
		if (group->tasks[kind] < 0)
			return -errno;
	}
	return 0;
}

static int limit(const struct cgroup *group, int kind, const char *file, const char *value)
{
	char path[96];

	/* What the host cannot enforce must not be promised. */
	if (ours[kind] < 0)
		return -EOPNOTSUPP;
	snprintf(path, sizeof path, "s%u/%s", group->number, file);
	return write_file(ours[kind], path, value);
}

int cgroup_limit(struct cgroup *group, const struct create *wanted)
{
	char value[64];
	int error = 0;

	if (group->memory != wanted->memory) {
		const char *none = unified ? "max" : "-1";
		snprintf(value, sizeof value, "%llu", (unsigned long long)wanted->memory);
		error = limit(group, CGROUP_MEMORY, unified ? "memory.max" : "memory.limit_in_bytes",
			      wanted->memory ? value : none);
		group->memory = error ? group->memory : wanted->memory;
	}
	if (!error && group->pids != wanted->pids) {
		/* Init is one of them: on version 2 with both of its threads. */
		snprintf(value, sizeof value, "%llu", (unsigned long long)wanted->pids + (unified ? 2 : 1));
		error = limit(group, CGROUP_PIDS, "pids.max", wanted->pids ? value : "max");
		group->pids = error ? group->pids : wanted->pids;
	}
	if (!error && group->cpu_quota != wanted->cpu_quota) {
		const char *none = unified ? "max 100000" : "-1";
		snprintf(value, sizeof value, unified ? "%llu 100000" : "%llu", (unsigned long long)wanted->cpu_quota);
		error = limit(group, CGROUP_CPU, unified ? "cpu.max" : "cpu.cfs_quota_us",
			      wanted->cpu_quota ? value : none);
		group->cpu_quota = error ? group->cpu_quota : wanted->cpu_quota;
	}
	return error;
}

int cgroup_freeze(struct cgroup *group, bool frozen)
{
	return group->directory < 0 ? -EOPNOTSUPP : write_file(group->directory, "cgroup.freeze", frozen ? "1" : "0");
}

int cgroup_events(struct cgroup *group)
{
	int fd = openat(group->directory, "cgroup.events", O_RDONLY | O_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

bool cgroup_is_frozen(int events)
{
	char text[256];
	ssize_t size = pread(events, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	return strstr(text, "frozen 1");
}

int cgroup_weight(const struct cgroup *group)
{
	char path[64];

	snprintf(path, sizeof path, "s%u/%s", group->number, unified ? "cpu.weight" : "cpu.shares");
	int fd = openat(ours[CGROUP_CPU], path, O_WRONLY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

void cgroup_restore(struct cgroup *group)
{
	AUTOCLOSE int weight = cgroup_weight(group);
	const char *full = unified ? "100" : "1024";

	if (weight >= 0 && write(weight, full, strlen(full)) < 0)
		return; /* it yields to others for longer than it should */
}

void cgroup_remove(struct cgroup *group)
{
	char path[32];

	close_fd(&group->directory);
	snprintf(path, sizeof path, "s%u", group->number);
	for (int kind = 0; kind < CGROUP_PLACES; kind++) {
		if (kind < CGROUP_KINDS)
			close_fd(&group->tasks[kind]);
		if (ours[kind] >= 0)
			unlinkat(ours[kind], path, AT_REMOVEDIR);
	}
}

void cgroup_close(void)
{
	for (int kind = 0; kind < CGROUP_PLACES; kind++)
		if (ours[kind] >= 0)
			sweep(parents[kind], name, 3000);
}
