#include "launcher/cgroup.h"

#include "launcher/cgroup_v2.h"
#include "launcher/host.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#define TCP_BUFFERS "134217728"

const char *const cgroup_names[CGROUP_KINDS] = {"cpu", "memory", "pids"};
static const char prefix[] = "dutyfree-";

/* The group that we create ours in, and ours: one per controller on version 1, the same one on version 2. */
static int parents[CGROUP_KINDS] = {-1, -1, -1}, own[CGROUP_KINDS] = {-1, -1, -1};
static bool is_v2;
/* On a version 1 host, version 2 has the freezer: the group that we create ours in, and ours. */
static int freezer_parent = -1, freezer_own = -1;
static int readonly_root = -1; /* v2: read-only mount of our group, for descriptors that init gets */
static char name[48];

bool list_contains(const char *list, const char *word, char separator)
{
	size_t size = strlen(word);

	for (const char *at = list; at && *at; at = strchr(at, separator), at = at ? at + 1 : NULL)
		if (strncmp(at, word, size) == 0 && (at[size] == separator || !at[size] || at[size] == '\n'))
			return true;
	return false;
}

/* Our group in a hierarchy of version 1, from /proc/self/cgroup. */
static void own_cgroup_path(const char *groups, const char *controller, char *path, size_t size)
{
	snprintf(path, size, "/");
	for (const char *line = groups; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
		char list[128], found[512];
		if (sscanf(line, "%*d:%127[^:]:%511[^\n]", list, found) == 2 && list_contains(list, controller, ','))
			snprintf(path, size, "%s", found);
	}
}

/* Our path below the root of the mount. In a container, the root of the mount is the container's own group. */
static const char *relative_path(const char *place, const char *root)
{
	size_t size = strcmp(root, "/") == 0 ? 0 : strlen(root);

	/* Not a group whose name only begins the same, nor one outside of what we can see. */
	if (strncmp(place, root, size) != 0 || (place[size] && place[size] != '/'))
		return "";
	return strncmp(place + size, "/..", 3) == 0 ? "" : place + size;
}

/* Whether the launcher was asked to go without this controller. */
static bool is_left_out(int kind)
{
	return host.without & WALL_CGROUPS || (kind == CGROUP_MEMORY && host.without & WALL_MEMORY_CGROUP);
}

static void find_v2(const char *groups, const char *root, const char *point)
{
	char place[512] = "/";
	const char *line_start = strncmp(groups, "0::", 3) == 0 ? groups : strstr(groups, "\n0::");

	if (line_start)
		sscanf(line_start + (*line_start == '\n'), "0::%511[^\n]", place);
	int found = cgroup_v2_find_parent(point, relative_path(place, root));
	is_v2 = found >= 0;
	for (int kind = 0; kind < CGROUP_KINDS && is_v2; kind++)
		parents[kind] = cgroup_v2_has_controller(found, kind) && !is_left_out(kind) ? found : -1;
}

static void find_hierarchies(const char *mounts, const char *groups)
{
	char root[512], point[512], type[32], options[256], path[1100], place[512];
	char v2_point[512] = "", v2_root[512] = "";

	for (const char *line = mounts; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
		const char *rest = strstr(line, " - ");
		if (sscanf(line, "%*d %*d %*s %511s %511s", root, point) != 2 || !rest ||
		    sscanf(rest, " - %31s %*s %255s", type, options) != 2)
			continue;
		if (strcmp(type, "cgroup2") == 0 && !v2_point[0]) {
			strcpy(v2_point, point);
			strcpy(v2_root, root);
		}
		for (int kind = 0; kind < CGROUP_KINDS && strcmp(type, "cgroup") == 0; kind++) {
			if (parents[kind] >= 0 || is_left_out(kind) || !list_contains(options, cgroup_names[kind], ','))
				continue;
			own_cgroup_path(groups, cgroup_names[kind], place, sizeof place);
			snprintf(path, sizeof path, "%s/%s", point, relative_path(place, root));
			parents[kind] = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
			/* Another user's group is of no use. */
			if (parents[kind] >= 0 && faccessat(parents[kind], ".", W_OK, AT_EACCESS) < 0)
				close_fd(&parents[kind]);
		}
	}
	/* Use version 2 if version 1 has none of these controllers. */
	if (v2_point[0] && !(host.without & WALL_CGROUPS) && parents[0] < 0 && parents[1] < 0 && parents[2] < 0)
		find_v2(groups, v2_root, v2_point);
	/* The host may not have mounted version 2; then mount it ourselves. */
	if (!is_v2 && !host.rootless)
		freezer_parent = v2_point[0] ? open(v2_point, O_RDONLY | O_DIRECTORY | O_CLOEXEC)
						  : mount_new("cgroup2", NULL, 0);
}

/* Remove a group and its children. Their processes have ended, or are about to. */
static void remove_group(int parent, const char *group, int timeout_ms)
{
	int fd = openat(parent, group, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	if (is_v2 && fd >= 0)
		write_file(fd, "cgroup.kill", "1");
	for (struct dirent *entry; dir && (entry = readdir(dir));)
		while (entry->d_type == DT_DIR && entry->d_name[0] != '.' && timeout_ms >= 0 &&
		       unlinkat(fd, entry->d_name, AT_REMOVEDIR) < 0 && errno == EBUSY && timeout_ms-- > 0)
			usleep(1000);
	if (dir)
		closedir(dir);
	while (unlinkat(parent, group, AT_REMOVEDIR) < 0 && errno == EBUSY && timeout_ms-- > 0)
		usleep(1000);
}

/* Every launcher holds a lock on its group, because its pid can mean another process, or none, in our pid namespace.
 * Returns the locked group of a dead launcher, or -1. */
static int lock_stale_group(int parent, const char *group)
{
	int owner = atoi(group + sizeof prefix - 1);

	if (owner <= 0 || kill(owner, 0) == 0 || errno != ESRCH)
		return -1;
	int fd = openat(parent, group, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
		close_fd(&fd);
	return fd;
}

static void remove_stale_groups(int parent)
{
	int fd = openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = fd < 0 ? NULL : fdopendir(fd);

	for (struct dirent *entry; dir && (entry = readdir(dir));) {
		if (strncmp(entry->d_name, prefix, sizeof prefix - 1) != 0)
			continue;
		AUTOCLOSE int held = lock_stale_group(parent, entry->d_name);
		if (held >= 0)
			remove_group(parent, entry->d_name, is_v2 ? 100 : 0);
	}
	if (dir)
		closedir(dir);
}

static bool is_linked(int parent, int group)
{
	struct stat held, found;

	return fstat(group, &held) == 0 && fstatat(parent, name, &found, 0) == 0 && held.st_ino == found.st_ino;
}

/* Whether two descriptors refer to one directory. Version 1 can mount several controllers together. */
static bool is_same_directory(int a, int b)
{
	struct stat one, other;

	return a >= 0 && b >= 0 && fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_ino == other.st_ino &&
	       one.st_dev == other.st_dev;
}

/* Create our group and lock it. A launcher in another pid namespace may take it for a dead one's and remove it before
 * we have the lock; then try again. -EEXIST if another launcher has this name. */
static int create_own_group(int parent)
{
	int group = -1;

	for (int timeout_ms = 1000; timeout_ms > 0; timeout_ms--) {
		if (mkdirat(parent, name, 0755) < 0)
			return -errno;
		group = openat(parent, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		if (group < 0 && errno != ENOENT)
			return -errno;
		/* If the file system has no locks, go on: only gc needs it. */
		bool locked = group >= 0 && (flock(group, LOCK_SH | LOCK_NB) == 0 || errno != EWOULDBLOCK);
		if (group >= 0 && (locked || timeout_ms == 1) && is_linked(parent, group))
			return group;
		close_fd(&group);
		unlinkat(parent, name, AT_REMOVEDIR);
		usleep(1000);
	}
	return -EBUSY;
}

/* The first kind with the same directories as this one, or the kind itself. */
static int first_shared_kind(int kind)
{
	for (int before = 0; before < kind; before++)
		if (is_same_directory(parents[before], parents[kind]))
			return before;
	return kind;
}

static void remove_own_groups(void)
{
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (own[kind] >= 0) {
			unlinkat(parents[kind], name, AT_REMOVEDIR);
			close_fd(&own[kind]);
		}
}

static int dup_fd(int fd)
{
	int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

	return copy < 0 ? -errno : copy;
}

static int create_own_groups(void)
{
	for (int kind = 0; kind < CGROUP_KINDS; kind++) {
		int shared = first_shared_kind(kind);
		if (parents[kind] < 0)
			continue;
		int created = shared < kind ? dup_fd(own[shared]) : create_own_group(parents[kind]);
		if (created < 0)
			return created;
		own[kind] = created;
	}
	return 0;
}

/* With a random name: a launcher in another pid namespace may have our pid. */
static int open_own_groups(void)
{
	uint32_t suffix;
	int error = -EEXIST;

	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (parents[kind] >= 0)
			remove_stale_groups(parents[kind]);
	for (int attempt = 0; error == -EEXIST && attempt < 8; attempt++) {
		if (getrandom(&suffix, sizeof suffix, 0) != sizeof suffix)
			return -errno;
		snprintf(name, sizeof name, "%s%d-%08x", prefix, getpid(), suffix);
		error = create_own_groups();
		if (error)
			remove_own_groups();
	}
	if (!error && freezer_parent >= 0) {
		remove_stale_groups(freezer_parent);
		int created = create_own_group(freezer_parent);
		freezer_own = created < 0 ? -1 : created; /* optional */
	}
	return error;
}

/* Our group on version 2, or -1. */
static int v2_group(void)
{
	for (int kind = 0; kind < CGROUP_KINDS && is_v2; kind++)
		if (own[kind] >= 0)
			return own[kind];
	return -1;
}

/* On hosts with many containers these lists are long. They are freed afterwards, because a static buffer of this size
 * would become a huge page that every sandbox copies. */
static int read_hierarchies(int proc)
{
	const size_t mounts_size = 4 << 20, groups_size = 64 << 10;
	char *mounts = malloc(mounts_size), *groups = malloc(groups_size);
	int error = mounts && groups ? 0 : -ENOMEM;

	if (!error && (read_file(proc, "self/mountinfo", mounts, mounts_size) < 0 ||
		       read_file(proc, "self/cgroup", groups, groups_size) < 0))
		error = -errno;
	if (!error)
		find_hierarchies(mounts, groups);
	free(mounts);
	free(groups);
	return error;
}

int cgroup_open(int proc)
{
	struct sysinfo info;
	char limit[32];

	int error = read_hierarchies(proc);
	if (error)
		return error;
	error = open_own_groups();
	if (!error && v2_group() >= 0) {
		error = cgroup_v2_split(v2_group(), proc);
		readonly_root = mount_clone(v2_group(), "", false);
		if (!error)
			error = readonly_root < 0 ? readonly_root
						  : mount_restrict(readonly_root, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOEXEC, -1);
	}
	if (error)
		return error;
	/* All sandboxes together leave the host a tenth of its memory. */
	if (own[CGROUP_MEMORY] >= 0 && sysinfo(&info) == 0) {
		uint64_t total = (uint64_t)info.totalram * info.mem_unit;
		snprintf(limit, sizeof limit, "%llu", (unsigned long long)(total - total / 10));
		write_file(own[CGROUP_MEMORY], is_v2 ? "memory.max" : "memory.limit_in_bytes", limit);
		/* No swap either: memory over a limit would go there. Child groups inherit this. */
		write_file(own[CGROUP_MEMORY], is_v2 ? "memory.swap.max" : "memory.swappiness", "0");
	}
	/* They also leave the host a quarter of its pids. */
	if (own[CGROUP_PIDS] >= 0 && read_file(proc, "sys/kernel/pid_max", limit, sizeof limit) > 0) {
		snprintf(limit, sizeof limit, "%llu", strtoull(limit, NULL, 10) / 4 * 3);
		write_file(own[CGROUP_PIDS], "pids.max", limit);
	}
	return 0;
}

void cgroup_describe(char *text, size_t size)
{
	bool any = own[0] >= 0 || own[1] >= 0 || own[2] >= 0;
	int used = snprintf(text, size, "cgroup=%s", is_v2 ? "v2" : any ? "v1" : "none");

	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (own[kind] >= 0 && used > 0 && (size_t)used < size)
			used += snprintf(text + used, size - (size_t)used, ":%s", cgroup_names[kind]);
	if (cgroup_can_freeze() && used > 0 && (size_t)used < size)
		snprintf(text + used, size - (size_t)used, " freezer=1");
}

int cgroup_create(struct cgroup *group, unsigned number, unsigned owner)
{
	char path[64];

	*group = (struct cgroup){.number = number, .v2_dir = -1, .freezer = -1, .tasks = {-1, -1, -1}};
	snprintf(path, sizeof path, "s%u", number);
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (own[kind] >= 0 && first_shared_kind(kind) == kind && mkdirat(own[kind], path, 0755) < 0)
			return -errno;
	if (v2_group() >= 0) {
		/* Init has this id when it starts processes here, and needs no other right on the group. */
		if (fchmodat(v2_group(), path, 0700, 0) < 0)
			return -errno;
		snprintf(path, sizeof path, "s%u/cgroup.procs", number);
		if (fchownat(v2_group(), path, owner, owner, 0) < 0)
			return -errno;
	}
	if (freezer_own >= 0 && mkdirat(freezer_own, path, 0755) < 0)
		return -errno;
	/* Version 1 counts TCP buffers apart, and by default with only the host's limit. */
	snprintf(path, sizeof path, "s%u/memory.kmem.tcp.limit_in_bytes", number);
	if (!is_v2 && own[CGROUP_MEMORY] >= 0)
		write_file(own[CGROUP_MEMORY], path, TCP_BUFFERS);
	return cgroup_reopen(group);
}

/* A file of a sandbox's group, or with "." the group itself, in one of our groups: a descriptor or -errno. */
static int open_in(int parent, const struct cgroup *group, const char *file, int flags)
{
	char path[64];

	snprintf(path, sizeof path, "s%u/%s", group->number, file);
	int fd = openat(parent, path, flags | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

/* Open it unless it is open: 0 or -errno. */
static int reopen(int *fd, int parent, const struct cgroup *group, const char *file, int flags)
{
	int found = parent < 0 || *fd >= 0 ? *fd : open_in(parent, group, file, flags);

	*fd = found < 0 ? -1 : found;
	return found < 0 && parent >= 0 ? found : 0;
}

int cgroup_reopen(struct cgroup *group)
{
	if (v2_group() >= 0 && group->v2_dir < 0)
		return reopen(&group->v2_dir, readonly_root, group, ".", O_PATH | O_DIRECTORY);
	int error = reopen(&group->freezer, freezer_own, group, ".", O_RDONLY | O_DIRECTORY);
	for (int kind = 0; kind < CGROUP_KINDS && !is_v2 && !error; kind++)
		error = reopen(&group->tasks[kind], own[kind], group, "tasks", O_WRONLY);
	return error;
}

void cgroup_close_fds(struct cgroup *group)
{
	close_fd(&group->v2_dir);
	close_fd(&group->freezer);
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		close_fd(&group->tasks[kind]);
}

bool cgroup_can_freeze(void)
{
	return freezer_own >= 0 || v2_group() >= 0;
}

bool cgroup_freezer_has_init(void)
{
	return freezer_own >= 0;
}

int cgroup_freeze(const struct cgroup *group, bool frozen)
{
	char path[64];

	snprintf(path, sizeof path, "s%u/cgroup.freeze", group->number);
	return write_file(is_v2 ? v2_group() : freezer_own, path, frozen ? "1" : "0");
}

int cgroup_join(void)
{
	return is_v2 || own[CGROUP_MEMORY] < 0 ? 0 : write_file(own[CGROUP_MEMORY], "tasks", "0");
}

int cgroup_open_events(const struct cgroup *group)
{
	return open_in(is_v2 ? v2_group() : freezer_own, group, "cgroup.events", O_RDONLY);
}

bool cgroup_is_frozen(int events)
{
	char text[256];
	ssize_t size = pread(events, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	return strstr(text, "frozen 1");
}

static int set_limit(const struct cgroup *group, int kind, const char *file, const char *value)
{
	char path[96];

	/* RLIMIT_NPROC limits processes instead (setup/sandbox.c). */
	if (own[kind] < 0 && kind == CGROUP_PIDS && host.rootless)
		return 0;
	/* Do not promise a limit that this host cannot enforce. */
	if (own[kind] < 0)
		return -EOPNOTSUPP;
	snprintf(path, sizeof path, "s%u/%s", group->number, file);
	return write_file(own[kind], path, value);
}

int cgroup_set_limits(struct cgroup *group, const struct create *spec)
{
	char value[64];
	int error = 0;

	if (group->memory != spec->memory) {
		const char *none = is_v2 ? "max" : "-1";
		snprintf(value, sizeof value, "%llu", (unsigned long long)spec->memory);
		error = set_limit(group, CGROUP_MEMORY, is_v2 ? "memory.max" : "memory.limit_in_bytes",
			      spec->memory ? value : none);
		group->memory = error ? group->memory : spec->memory;
	}
	if (!error && group->pids != spec->pids) {
		/* On version 1, init's work thread is in the group too. */
		snprintf(value, sizeof value, "%llu", (unsigned long long)spec->pids + (is_v2 ? 0 : 1));
		error = set_limit(group, CGROUP_PIDS, "pids.max", spec->pids ? value : "max");
		group->pids = error ? group->pids : spec->pids;
	}
	if (!error && group->cpu_quota != spec->cpu_quota) {
		const char *none = is_v2 ? "max 100000" : "-1";
		snprintf(value, sizeof value, is_v2 ? "%llu 100000" : "%llu", (unsigned long long)spec->cpu_quota);
		error = set_limit(group, CGROUP_CPU, is_v2 ? "cpu.max" : "cpu.cfs_quota_us",
			      spec->cpu_quota ? value : none);
		group->cpu_quota = error ? group->cpu_quota : spec->cpu_quota;
	}
	return error;
}

ssize_t cgroup_read(const struct cgroup *group, int kind, const char *file, char *text, size_t size)
{
	char path[96];

	snprintf(path, sizeof path, "s%u/%s", group->number, file);
	return own[kind] < 0 ? -EOPNOTSUPP : read_file(own[kind], path, text, size);
}

bool cgroup_is_v2(void)
{
	return is_v2;
}

int cgroup_open_weight(const struct cgroup *group)
{
	return open_in(own[CGROUP_CPU], group, is_v2 ? "cpu.weight" : "cpu.shares", O_WRONLY);
}

int cgroup_open_oom(const struct cgroup *group)
{
	int fd = open_in(own[CGROUP_MEMORY], group, is_v2 ? "memory.events" : "memory.oom_control", O_RDONLY);

	return fd < 0 ? -EOPNOTSUPP : fd;
}

int cgroup_reset_weight(struct cgroup *group)
{
	AUTOCLOSE int weight = own[CGROUP_CPU] < 0 ? -1 : cgroup_open_weight(group);
	const char *full = is_v2 ? CGROUP_WEIGHT_V2 : CGROUP_WEIGHT_V1;

	if (own[CGROUP_CPU] < 0)
		return 0;
	return weight < 0 ? weight : write(weight, full, strlen(full)) < 0 ? -errno : 0;
}

void cgroup_remove(struct cgroup *group)
{
	char path[32];

	close_fd(&group->v2_dir);
	snprintf(path, sizeof path, "s%u", group->number);
	for (int kind = 0; kind < CGROUP_KINDS; kind++) {
		close_fd(&group->tasks[kind]);
		if (own[kind] >= 0)
			unlinkat(own[kind], path, AT_REMOVEDIR);
	}
	close_fd(&group->freezer);
	if (freezer_own >= 0)
		unlinkat(freezer_own, path, AT_REMOVEDIR);
}

void cgroup_close(void)
{
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (own[kind] >= 0)
			remove_group(parents[kind], name, 3000);
	if (freezer_own >= 0)
		remove_group(freezer_parent, name, 3000);
}
