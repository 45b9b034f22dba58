#include "launcher/host.h"

#include "sys.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct host host = {.can_drop_groups = true, .ids = IDS};

static bool has_cap_sys_admin(void)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2] = {{0}, {0}};

	return syscall(SYS_capget, &header, data) == 0 && data[0].effective & (1u << CAP_SYS_ADMIN);
}

/* --- Id ranges from /etc/subuid ------------------------------------------------------------------ */

static void user_name(unsigned user, char *name, size_t size)
{
	char line[1024], found[256];
	unsigned number;
	FILE *file = fopen("/etc/passwd", "re");

	name[0] = 0;
	while (file && !name[0] && fgets(line, sizeof line, file))
		if (sscanf(line, "%255[^:]:%*[^:]:%u:", found, &number) == 2 && number == user)
			snprintf(name, size, "%s", found);
	if (file)
		fclose(file);
}

/* The longest range of the user, who is listed by name or by number. */
static unsigned subid_range(const char *path, const char *name, unsigned user, unsigned *first)
{
	char line[256], found[128], number[16];
	unsigned begin, count, best = 0;
	FILE *file = fopen(path, "re");

	snprintf(number, sizeof number, "%u", user);
	while (file && fgets(line, sizeof line, file)) {
		if (sscanf(line, "%127[^:]:%u:%u", found, &begin, &count) != 3 || count <= best ||
		    (strcmp(found, name) != 0 && strcmp(found, number) != 0))
			continue;
		*first = begin;
		best = count;
	}
	if (file)
		fclose(file);
	return best < IDS ? best : IDS - 1;
}

/* Run newuidmap or newgidmap, which are setuid root: id 0 is the caller, the ids above it are the range. */
static bool run_id_mapper(const char *program, pid_t pid, unsigned own, unsigned first, unsigned count)
{
	char words[5][16];
	int status;
	pid_t child = fork();

	if (child == 0) {
		/* If the user has no such range we go on without, so its message would only confuse. */
		int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
		dup2(null, 2);
		snprintf(words[0], sizeof *words, "%d", pid);
		snprintf(words[1], sizeof *words, "%u", own);
		snprintf(words[2], sizeof *words, "%u", first);
		snprintf(words[3], sizeof *words, "%u", count);
		execve(program,
		       (char *[]){(char *)program, words[0], "0", words[1], "1", "1", words[2], words[3], NULL},
		       (char *[]){NULL});
		_exit(127);
	}
	return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/* In a child that stays in the host's user namespace, where these programs work. It waits until the parent is in the
 * new one. */
static _Noreturn void map_subid_ranges(pid_t pid, unsigned user, unsigned group, int socket)
{
	unsigned first_user = 0, first_group = 0;
	char name[256], byte;

	user_name(user, name, sizeof name);
	unsigned users = subid_range("/etc/subuid", name, user, &first_user);
	unsigned groups = subid_range("/etc/subgid", name, user, &first_group);
	unsigned count = users < groups ? users : groups;
	if (read(socket, &byte, 1) != 1 || !count)
		_exit(1);
	_exit(run_id_mapper("/usr/bin/newuidmap", pid, user, first_user, count) &&
			      run_id_mapper("/usr/bin/newgidmap", pid, group, first_group, count)
		      ? 0
		      : 1);
}

static int write_single_id(const char *file, unsigned own)
{
	char map[32], current[64];

	if (read_file(AT_FDCWD, file, current, sizeof current) > 0)
		return 0;
	snprintf(map, sizeof map, "0 %u 1", own);
	return write_file(AT_FDCWD, file, map);
}

static int enter_user_namespace(void)
{
	unsigned user = geteuid(), group = getegid();
	pid_t ourselves = getpid();
	int pair[2], status, error = 0;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	pid_t mapper = fork();
	if (mapper == 0) {
		close(pair[1]);
		map_subid_ranges(ourselves, user, group, pair[0]);
	}
	close(pair[0]);
	if (mapper < 0 || unshare(CLONE_NEWUSER) < 0)
		error = -errno;
	if (!error && send(pair[1], "", 1, MSG_NOSIGNAL) < 0 && errno != EPIPE)
		error = -errno;
	close(pair[1]);
	if (mapper > 0)
		waitpid(mapper, &status, 0);
	if (error)
		return error;
	/* Any user may map a single id, if setgroups is denied first. */
	write_file(AT_FDCWD, "/proc/self/setgroups", "deny");
	error = write_single_id("/proc/self/uid_map", user);
	return error ? error : write_single_id("/proc/self/gid_map", group);
}

/* How many ids are mapped from 0 on, and whether the whole range of sandbox ids is. */
static unsigned mapped_ids(const char *file, bool *all)
{
	char text[4096];
	unsigned long inside, outside, count, best = 0;

	*all = false;
	if (read_file(AT_FDCWD, file, text, sizeof text) < 0)
		return 0;
	for (const char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
		if (sscanf(line, "%lu %lu %lu", &inside, &outside, &count) != 3)
			continue;
		if (inside <= best && inside + count > best)
			best = inside + count;
	}
	*all = best >= 1ul << 31;
	return best > IDS ? IDS : (unsigned)best;
}

int host_enter(void)
{
	bool all_users, all_groups;
	char text[16];

	if (!has_cap_sys_admin()) {
		int error = enter_user_namespace();
		if (error)
			return error;
		host.own_userns = true;
	}
	unsigned users = mapped_ids("/proc/self/uid_map", &all_users);
	unsigned groups = mapped_ids("/proc/self/gid_map", &all_groups);
	host.rootless = !all_users || !all_groups;
	host.ids = users < groups ? users : groups;
	host.can_drop_groups = read_file(AT_FDCWD, "/proc/self/setgroups", text, sizeof text) <= 0 ||
		      strncmp(text, "deny", 4) != 0;
	if (host.own_userns && host.can_drop_groups && setgroups(0, NULL) < 0)
		return -errno;
	/* Rootless: we may not clone mounts of the host's mount namespace, but those of our own copy of it. */
	if (host.rootless && unshare(CLONE_NEWNS) < 0)
		return -errno;
	return host.ids ? 0 : -EPERM;
}

void host_describe(char *text, size_t size)
{
	snprintf(text, size, " mode=%s ids=%u groups=%s pid=%d without=%u", host.rootless ? "rootless" : "root",
		 host.ids, host.can_drop_groups ? "dropped" : "kept", (int)getpid(), host.without);
}
