/* Inputs can name any path. So the whole host is read-only and without devices, except for the two directories that the
 * fuzzer writes to, and a small tmpfs without exec. All three are in DUTYFREE_FUZZ (see __main__.py). */
#include "jail.h"

#include "sys.h"

#include <fcntl.h>
#include <ftw.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Also without a jail: end when the parent is killed. */
__attribute__((constructor)) static void end_with_parent(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
}

static void must(int result, const char *step)
{
	if (result >= 0)
		return;
	fprintf(stderr, "fuzz: no jail: %s: %s\n", step, strerror(result == -1 ? errno : -result));
	exit(NO_JAIL);
}

static void become_root(void)
{
	unsigned user = geteuid(), group = getegid();
	char map[32];

	if (user == 0) {
		must(unshare(CLONE_NEWNS), "mount namespace");
		return;
	}
	must(unshare(CLONE_NEWUSER | CLONE_NEWNS), "user namespace");
	must(write_file(AT_FDCWD, "/proc/self/setgroups", "deny"), "setgroups");
	snprintf(map, sizeof map, "0 %u 1", user);
	must(write_file(AT_FDCWD, "/proc/self/uid_map", map), "uid_map");
	snprintf(map, sizeof map, "0 %u 1", group);
	must(write_file(AT_FDCWD, "/proc/self/gid_map", map), "gid_map");
}

void jail_enter(void)
{
	static const char *const options[][2] = {{"size", "64m"}, {"nr_inodes", "20000"}, {"mode", "0755"}, {NULL, NULL}};
	static const char *const kept[] = {"corpus", "crashes"};
	const char *home = getenv("DUTYFREE_FUZZ");
	int mounts[2], all;

	must(home && chdir(home) == 0 ? 0 : -ENOENT, "DUTYFREE_FUZZ");
	become_root();
	must(mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL), "private mounts");
	for (int i = 0; i < 2; i++)
		must(mounts[i] = mount_clone(AT_FDCWD, kept[i], false), kept[i]);
	must(all = (int)syscall(SYS_open_tree, AT_FDCWD, "/", OPEN_TREE_CLOEXEC), "open_tree");
	must(mount_restrict(all, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID, -1), "read-only mounts");
	close(all);
	for (int i = 0; i < 2; i++) {
		must(mount_attach(mounts[i], kept[i]), kept[i]);
		close(mounts[i]);
	}
	int jail = mount_new("tmpfs", options, MOUNT_ATTR_NOEXEC | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID);
	must(jail, "tmpfs");
	must(mount_attach(jail, "jail"), "jail");
	must(fchdir(jail), "jail");
	close(jail);
	umask(022);
}

void jail_terminals(void)
{
	static const char *const options[][2] = {{"ptmxmode", "0666"}, {NULL, NULL}};
	int terminals = mount_new("devpts", options, MOUNT_ATTR_NOEXEC | MOUNT_ATTR_NOSUID);

	must(terminals, "devpts");
	must(mount_attach(terminals, "/dev/pts"), "/dev/pts");
	close(terminals);
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *place)
{
	(void)found, (void)kind;
	if (place->level > 0)
		remove(path);
	return 0;
}

void jail_empty(void)
{
	nftw(".", remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

void jail_file(const char *path, const void *data, size_t size)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	must(fd, path);
	must(write_all(fd, data, size), path);
	close(fd);
}

void jail_cover(const char *path, const char *with)
{
	must(mount(with, path, NULL, MS_BIND, NULL), path);
}

int jail_memory(const void *data, size_t size)
{
	int fd = memfd_create("input", MFD_CLOEXEC);

	must(fd, "memory");
	must(write_all(fd, data, size), "memory");
	must((int)lseek(fd, 0, SEEK_SET), "memory");
	return fd;
}

void require(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "fuzz: failed check: %s\n", what);
	abort();
}
