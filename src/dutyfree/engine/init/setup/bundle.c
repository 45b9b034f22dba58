/* Mount a bundle's root and execute the runtime, in a mount namespace of its own: the mounts end with the runtime and
 * the container, however these end, so nothing has to unmount them.
 *
 *   DIRECTORY/m        a tmpfs for the mount points, and for what the container writes
 *   DIRECTORY/m/0, 1…  the lower directories, read-only
 *   DIRECTORY/m/root   the overlay
 *   DIRECTORY/disk     if this directory exists, what the container writes is there, and not in memory
 *
 * FIRST_ID is the host's id of the container's root, or 0 without a user namespace. The lower directories show the ids
 * that the container expects by idmapped mounts. OPTIONS are those of the tmpfs. HIDDEN is a mount to hide from the
 * runtime, or empty. GROUPS are the files, separated by colons, that put this process into its control groups. */
#include "setup/bundle.h"

#include "protocol.h"
#include "sys.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/mount.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define FAILED 70
#define IDS 65536
#define POINT 16 /* "m/" and the number of a layer */

static int fail(const char *what, int error)
{
	fprintf(stderr, "dutyfree-init: %s: %s\n", what, strerror(error < 0 ? -error : error));
	return FAILED;
}

static int write_map(pid_t pid, const char *name, unsigned first)
{
	char path[64], line[64];

	snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
	snprintf(line, sizeof line, "0 %u %u", first, IDS);
	return write_file(AT_FDCWD, path, line);
}

/* A user namespace with these ids. A descriptor or -errno. */
static int user_namespace(unsigned first)
{
	int ends[2], fd = -1, error;
	char path[64];

	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	pid_t pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ends[0]);
		bool made = unshare(CLONE_NEWUSER) == 0 && write_all(ends[1], "", 1) == 0;
		while (made)
			pause();
		_exit(1);
	}
	error = pid < 0 ? -errno : 0;
	close(ends[1]);
	if (!error && read(ends[0], path, 1) != 1)
		error = -EPERM;
	if (!error)
		error = write_map(pid, "uid_map", first);
	if (!error)
		error = write_map(pid, "gid_map", first);
	if (!error) {
		snprintf(path, sizeof path, "/proc/%d/ns/user", pid);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		error = fd < 0 ? -errno : 0;
	}
	close(ends[0]);
	if (pid > 0) {
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
	}
	return error ? error : fd;
}

/* As in mount_tree (sandbox.c): some file systems have no idmapped mounts. */
static int mount_lower(const char *path, const char *point, int namespace)
{
	const uint64_t attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
	AUTOCLOSE int mount = mount_clone(AT_FDCWD, path, false);

	if (mount < 0)
		return mount;
	int error = mount_restrict(mount, attributes, namespace);
	if (error == -EINVAL && namespace >= 0)
		error = mount_restrict(mount, attributes, -1);
	if (!error && mkdir(point, 0755) < 0)
		error = -errno;
	return error ? error : mount_attach(mount, point);
}

static int make_upper(const char *path, unsigned owner, mode_t mode)
{
	if (mkdir(path, mode) < 0 && errno != EEXIST)
		return -errno;
	return chmod(path, mode) < 0 || chown(path, owner, owner) < 0 ? -errno : 0;
}

static int mount_overlay(char **lowers, int count, unsigned owner, int namespace)
{
	const bool on_disk = access("disk", F_OK) == 0;
	const char *up = on_disk ? "disk/up" : "m/up", *work = on_disk ? "disk/work" : "m/work";
	char lower[LAYERS_MAX * POINT] = "", *end = lower;
	const char *options[][2] = {{"source", "overlay"}, {"lowerdir", lower},    {"upperdir", up},
				    {"workdir", work},     {"redirect_dir", "on"}, {"metacopy", "on"},
				    {NULL, NULL}};

	for (int i = 0; i < count; i++) {
		char point[POINT];
		snprintf(point, sizeof point, "m/%d", i);
		int error = mount_lower(lowers[i], point, namespace);
		if (error)
			return error;
		end += snprintf(end, sizeof lower - (size_t)(end - lower), "%s%s", i ? ":" : "", point);
	}
	int error = make_upper(up, owner, 0755);
	if (!error)
		error = make_upper(work, owner, 0700);
	if (!error && mkdir("m/root", 0755) < 0)
		error = -errno;
	if (error)
		return error;
	AUTOCLOSE int overlay =
		mount_new("overlay", (const char *const(*)[2])options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	return overlay < 0 ? overlay : mount_attach(overlay, "m/root");
}

static int enter_groups(char *files)
{
	for (char *next, *file = files; *file; file = next) {
		char *end = strchrnul(file, ':');
		next = *end ? end + 1 : end;
		*end = 0;
		int error = write_file(AT_FDCWD, file, "0");
		if (error)
			return error;
	}
	return 0;
}

/* When the mounts were ready, as nanoseconds of CLOCK_MONOTONIC. */
static int note_time(void)
{
	char text[32];
	int size = snprintf(text, sizeof text, "%llu", (unsigned long long)now());
	AUTOCLOSE int fd = open("mounted", O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	return fd < 0 ? -errno : write_all(fd, text, (size_t)size);
}

int bundle_run(int argc, char **argv)
{
	int count = 0, error;
	char **lowers = argv + 5;

	while (5 + count < argc && strcmp(lowers[count], "--") != 0)
		count++;
	if (argc < 5 + count + 2 || count < 1 || count > LAYERS_MAX) {
		fputs("dutyfree-init: bundle needs DIRECTORY FIRST_ID OPTIONS HIDDEN GROUPS LOWER... -- COMMAND...\n",
		      stderr);
		return 64;
	}
	error = enter_groups(argv[4]);
	if (error)
		return fail("cannot enter a control group", error);
	const unsigned owner = (unsigned)strtoul(argv[1], NULL, 10);
	AUTOCLOSE int namespace = owner ? user_namespace(owner) : -1;
	if (owner && namespace < 0)
		return fail("cannot make a user namespace", namespace);
	if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return fail("cannot make a mount namespace", errno);
	if (*argv[3] && umount2(argv[3], MNT_DETACH) < 0)
		return fail(argv[3], errno);
	umask(0);
	if (chdir(argv[0]) < 0 || mount("bundle", "m", "tmpfs", MS_NOSUID | MS_NODEV, argv[2]) < 0)
		return fail(argv[0], errno);
	error = mount_overlay(lowers, count, owner, namespace);
	if (error)
		return fail("cannot mount the overlay", error);
	umask(022);
	error = note_time();
	if (error)
		return fail("cannot write to the bundle", error);
	execvp(lowers[count + 1], lowers + count + 1);
	return fail(lowers[count + 1], errno);
}
