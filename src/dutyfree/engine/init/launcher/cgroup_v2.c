#include "launcher/cgroup_v2.h"

#include "launcher/cgroup.h"
#include "launcher/host.h"
#include "sys.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

int cgroup_v2_inits = -1, cgroup_v2_namespace = -1;

bool cgroup_v2_has_controller(int group, int kind)
{
	char list[256];

	return read_file(group, "cgroup.subtree_control", list, sizeof list) > 0 &&
	       list_contains(list, cgroup_names[kind], ' ');
}

/* Whether it has processes and is not the root group, which may have both processes and children. */
static bool has_processes(int group)
{
	char text[32];

	return read_file(group, "cgroup.type", text, sizeof text) > 0 &&
	       read_file(group, "cgroup.procs", text, sizeof text) > 0;
}

/* Enable as many controllers as possible for the children of the group. Returns how many are enabled. */
static int enable_controllers(int group)
{
	int count = 0;

	/* A few controllers would still work, but they would make the children threaded cgroups. */
	if (has_processes(group))
		return 0;
	for (int kind = 0; kind < CGROUP_KINDS; kind++) {
		char word[16];
		if (kind == CGROUP_MEMORY && host.without & WALL_MEMORY_CGROUP)
			continue;
		snprintf(word, sizeof word, "+%s", cgroup_names[kind]);
		if (!cgroup_v2_has_controller(group, kind))
			write_file(group, "cgroup.subtree_control", word);
		count += cgroup_v2_has_controller(group, kind);
	}
	return count;
}

/* A group with processes cannot enable controllers. If there is no other group, move its processes into a child. */
static int move_processes_out(int group)
{
	char list[8192], path[64];

	if (mkdirat(group, "dutyfree-rest", 0755) < 0 && errno != EEXIST)
		return 0;
	snprintf(path, sizeof path, "dutyfree-rest/cgroup.procs");
	for (int round = 0; round < 10 && read_file(group, "cgroup.procs", list, sizeof list) > 0; round++) {
		/* If the list was cut off, the last line may be half a pid, which is another process. */
		char *last = strrchr(list, '\n');
		if (last)
			*last = 0;
		for (char *pid = strtok(list, "\n"); pid; pid = strtok(NULL, "\n"))
			write_file(group, path, pid);
	}
	return enable_controllers(group);
}

static bool is_writable(int group)
{
	/* To start a process in another group, we need write access to cgroup.procs of the common ancestor. */
	return faccessat(group, ".", W_OK, AT_EACCESS) == 0 && faccessat(group, "cgroup.procs", W_OK, AT_EACCESS) == 0;
}

/* Whether the groups above this one were not delegated to us. */
static bool is_delegation_boundary(const char *path)
{
	char value[8];

	return getxattr(path, "trusted.delegate", value, sizeof value) > 0 ||
	       getxattr(path, "user.delegate", value, sizeof value) > 0;
}

int cgroup_v2_find_parent(const char *point, const char *below)
{
	char path[1100];
	int best = -1, most = 0, top = -1;

	int length = snprintf(path, sizeof path, "%s%s", point, strcmp(below, "/") == 0 ? "" : below);
	if (length < 0 || (size_t)length >= sizeof path)
		return -1;
	for (;;) {
		int group = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		int found = group >= 0 && is_writable(group) ? enable_controllers(group) : 0;
		close_fd(&top);
		if (found > most) {
			close_fd(&best);
			best = group;
			most = found;
		} else {
			top = group;
		}
		char *last = strrchr(path, '/');
		if (most == CGROUP_KINDS || strlen(path) <= strlen(point) || !last || is_delegation_boundary(path))
			break;
		*last = 0;
	}
	if (best < 0 && top >= 0 && is_writable(top) && move_processes_out(top) > 0) {
		best = top;
		top = -1;
	}
	close_fd(&top);
	return best;
}

static int make_namespace(void *proc)
{
	if (unshare(CLONE_NEWCGROUP) < 0)
		return errno;
	cgroup_v2_namespace = openat(*(int *)proc, "thread-self/ns/cgroup", O_RDONLY | O_CLOEXEC);
	return cgroup_v2_namespace < 0 ? errno : 0;
}

int cgroup_v2_split(int group, int proc)
{
	/* Before it has children: afterwards no process can be in it. */
	int error = run_child(make_namespace, &proc, group);

	if (error)
		return error;
	if (mkdirat(group, "init", 0755) < 0 && errno != EEXIST)
		return -errno;
	cgroup_v2_inits = openat(group, "init", O_PATH | O_DIRECTORY | O_CLOEXEC);
	enable_controllers(group);
	/* Every init starts processes in a sibling group, that of its own sandbox. The kernel asks for write access
	 * here, on the common ancestor, and on the sandbox's group, which only its own init has. */
	if (cgroup_v2_inits < 0 || fchmodat(group, "cgroup.procs", 0666, 0) < 0)
		return -errno;
	return 0;
}
