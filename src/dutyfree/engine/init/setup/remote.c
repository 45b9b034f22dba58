/* Init on another machine: two processes.
 *
 * The supervisor is what ssh starts. It makes the directory of the sandbox and holds a lock on it. Init is its child:
 * PID 1 of a pid namespace if the kernel allows it, otherwise a process that adopts the orphans of its commands. Init
 * ends when the stream ends. Then the supervisor kills what is left, removes the directory and exits. If the supervisor
 * was killed, the lock is free, and the next supervisor removes the directory. */
#include "setup/remote.h"

#include "pid1/init.h"
#include "setup/guest.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PREFIX "sandbox-"
#define ATTEMPTS 10
#define NO_NAMESPACE 71 /* exit code of an init that could not prepare its namespace */
#define FAILED 70
#define NOT_REMOVED 75
#define END_NS 10000000000u /* how long killed processes may take to end */

static int fail(const char *what, int error)
{
	fprintf(stderr, "dutyfree-init: %s: %s\n", what, strerror(error));
	return FAILED;
}

/* --- The directory ------------------------------------------------------------------------------- */

/* Others may write to the parent, such as /tmp: use only a directory that is ours. */
static int check_base(const char *base)
{
	struct stat found;

	if (mkdir(base, 0711) < 0 && errno != EEXIST)
		return -errno;
	if (lstat(base, &found) < 0)
		return -errno;
	if (!S_ISDIR(found.st_mode))
		return -ENOTDIR;
	return found.st_uid == geteuid() && !(found.st_mode & (S_IWGRP | S_IWOTH)) ? 0 : -EPERM;
}

/* The lock of a directory, as a descriptor, or -errno. It ends with its process, and no child inherits it. */
static int lock_directory(const char *path)
{
	struct stat held, found;
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	/* It may have been removed, or replaced, before we had the lock. */
	if (flock(fd, LOCK_EX | LOCK_NB) < 0 || fstat(fd, &held) < 0 || lstat(path, &found) < 0 ||
	    held.st_ino != found.st_ino) {
		close(fd);
		return -EAGAIN;
	}
	return fd;
}

/* Commands may leave directories that their own user cannot write, or a tree deeper than we go: the tools help. */
static int remove_directory(const char *path)
{
	static char *const script = "chmod -R u+rwX -- \"$0\"; rm -rf -- \"$0\"";
	int error = remove_tree(path, 0), status = 0;

	if (!error)
		return 0;
	pid_t pid = fork();
	if (pid == 0) {
		sigset_t none;
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		execv("/bin/sh", (char *[]){"sh", "-c", script, (char *)path, NULL});
		_exit(127);
	}
	while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return access(path, F_OK) < 0 && errno == ENOENT ? 0 : error;
}

static void remove_abandoned(const char *base)
{
	char path[PATH_MAX];
	DIR *entries = opendir(base);

	for (struct dirent *entry; entries && (entry = readdir(entries));) {
		if (strncmp(entry->d_name, PREFIX, strlen(PREFIX)) != 0 ||
		    (size_t)snprintf(path, sizeof path, "%s/%s", base, entry->d_name) >= sizeof path)
			continue;
		AUTOCLOSE int lock = lock_directory(path);
		if (lock >= 0)
			remove_directory(path);
	}
	if (entries)
		closedir(entries);
}

/* Another supervisor may take the new directory for an abandoned one until we have locked it. Other users may enter it,
 * but not read it: then they could lock it. */
static int make_directory(const char *path)
{
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		if (mkdir(path, 0711) < 0 && errno != EEXIST)
			return -errno;
		int lock = lock_directory(path);
		if (lock < 0) {
			usleep(1000);
			continue;
		}
		if (mkdirat(lock, "work", 0755) < 0 || mkdirat(lock, "tmp", 0755) < 0) {
			int error = -errno;
			close(lock);
			return error;
		}
		return lock;
	}
	return -EAGAIN;
}

/* --- Init ---------------------------------------------------------------------------------------- */

/* In the new namespace: a /proc of it, in which init finds its processes. */
static bool mount_proc(void)
{
	return mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL) == 0 &&
	       mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) == 0;
}

static _Noreturn void child(pid_t supervisor, bool isolated)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* The supervisor may have died before this. In a namespace its number is not visible. */
	if (!isolated && getppid() != supervisor)
		_exit(0);
	if (isolated && !mount_proc())
		_exit(NO_NAMESPACE);
	if (!isolated)
		prctl(PR_SET_CHILD_SUBREAPER, 1);
	if (write_all(1, guest_preamble, sizeof guest_preamble - 1) < 0)
		_exit(0);
	_exit(guest_serve(!isolated));
}

static pid_t start(bool isolated)
{
	unsigned long flags = SIGCHLD | (isolated ? CLONE_NEWPID | CLONE_NEWNS : 0);
	pid_t supervisor = getpid();
	long pid = syscall(SYS_clone, flags, 0, 0, 0, 0);

	if (pid == 0)
		child(supervisor, isolated);
	return pid < 0 ? -errno : (pid_t)pid;
}

/* Wait for the end of init. It ends soon after its stream, unless a command has stopped it: then kill it. */
static int wait_for(pid_t pid)
{
	sigset_t child;
	int status = 0;

	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	AUTOCLOSE int signals = signalfd(-1, &child, SFD_CLOEXEC);
	struct pollfd waits[] = {{.fd = signals, .events = POLLIN}, {.fd = 0, .events = POLLRDHUP}};
	uint64_t end = 0;
	while (waitpid(pid, &status, WNOHANG) == 0) {
		struct signalfd_siginfo info;
		if (end && now() > end) {
			kill(pid, SIGKILL);
			waits[1].fd = -1;
			end = 0;
		}
		if (poll(waits, 2, end || signals < 0 ? 100 : -1) <= 0)
			continue;
		if (waits[0].revents && read(signals, &info, sizeof info) < 0)
			break;
		if (waits[1].revents & (POLLHUP | POLLRDHUP | POLLERR)) {
			waits[1].fd = -1; /* or poll would return at once */
			end = now() + END_NS;
		}
	}
	return status;
}

/* Init's orphans are our children now. False if some could not be killed, such as those of another user. */
static bool end_processes(void)
{
	uint64_t end = now() + END_NS;

	for (;;) {
		process_signal_descendants(SIGKILL);
		pid_t pid;
		while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
			;
		if (pid < 0)
			return true;
		if (now() > end)
			return false;
		usleep(1000);
	}
}

int remote_run(const char *base, const char *name)
{
	char path[PATH_MAX];
	sigset_t all;
	int status, null;

	if (*base != '/' || strncmp(name, PREFIX, strlen(PREFIX)) != 0 || strchr(name, '/') ||
	    (size_t)snprintf(path, sizeof path, "%s/%s", base, name) >= sizeof path - 8)
		return fail("the directory is not valid", EINVAL);
	umask(022);
	is_remote = shares_pids = true;
	int error = check_base(base);
	if (error == -EPERM) {
		fprintf(stderr, "dutyfree-init: %s belongs to another user, or others can write to it\n", base);
		return FAILED;
	}
	if (error)
		return fail(base, -error);
	remove_abandoned(base);
	AUTOCLOSE int lock = make_directory(path);
	if (lock < 0)
		return fail(path, -lock);
	/* Only the end of the stream ends us, so that the directory is removed. */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	pid_t pid = start(true);
	status = pid < 0 ? NO_NAMESPACE << 8 : wait_for(pid);
	if (WIFEXITED(status) && WEXITSTATUS(status) == NO_NAMESPACE) {
		pid = start(false);
		status = pid < 0 ? FAILED << 8 : wait_for(pid);
	}
	/* The owner waits for the end of the output: nothing but us holds it from here on. */
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null >= 0) {
		dup2(null, 0);
		dup2(null, 1);
	}
	if (!end_processes()) {
		fputs("dutyfree-init: processes of another user still run\n", stderr);
		status = NOT_REMOVED << 8;
	}
	error = remove_directory(path);
	if (error) {
		fprintf(stderr, "dutyfree-init: cannot remove %s: %s\n", path, strerror(-error));
		status = NOT_REMOVED << 8;
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
