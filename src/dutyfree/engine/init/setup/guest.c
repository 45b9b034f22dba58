/* Init as a guest. The runtime has made the namespaces, mounts and limits, so only the streams are left to prepare.
 *
 * Commands run as root in the same container. They cannot speak to the owner in our place: stdin and stdout are not
 * inherited, and without CAP_SYS_PTRACE no process can trace us or open our descriptors through /proc, because we are
 * not dumpable. Nor can they lower our resource limits, which would make us fail. A container with that capability, with
 * CAP_SYS_RESOURCE or with --privileged, has no such protection. */
#include "setup/guest.h"

#include "pid1/init.h"
#include "sys.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIRST_FREE 16 /* above all numbers that init.h fixes */

const char guest_preamble[] = "\0dutyfree\n";

/* The file with the OOM kill count of the container's own control group, as the runtime mounts it; v2, then v1. On a
 * whole machine these files are not about us; if all of the machine is ours, the kernel's own count is. */
static int open_oom_events(void)
{
	if (is_machine)
		return open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
	if (is_remote)
		return open("/dev/null", O_RDONLY | O_CLOEXEC);
	int fd = open("/sys/fs/cgroup/memory.events", O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		fd = open("/sys/fs/cgroup/memory/memory.oom_control", O_RDONLY | O_CLOEXEC);
	return fd < 0 ? open("/dev/null", O_RDONLY | O_CLOEXEC) : fd;
}

/* Give a descriptor a number that no fixed one replaces. */
static int raised(int fd)
{
	int higher = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, FIRST_FREE);

	close_at(&fd);
	return higher;
}

/* Move a descriptor to a fixed number. Init reads and writes without blocking. */
static int move_stream(int from, int to)
{
	if (dup3(from, to, O_CLOEXEC) < 0 || fcntl(to, F_SETFL, fcntl(to, F_GETFL) | O_NONBLOCK) < 0)
		return -errno;
	return 0;
}

static bool is_same_file(int a, int b)
{
	struct stat one, other;

	return fstat(a, &one) == 0 && fstat(b, &other) == 0 && one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

static int move_streams(int from, int to)
{
	AUTOCLOSE int input = fcntl(from, F_DUPFD_CLOEXEC, FIRST_FREE);
	AUTOCLOSE int output = fcntl(to, F_DUPFD_CLOEXEC, FIRST_FREE);
	AUTOCLOSE int null = raised(open("/dev/null", O_RDWR | O_CLOEXEC));
	AUTOCLOSE int events = raised(open_oom_events());
	int error;

	if (input < 0 || output < 0 || null < 0 || events < 0)
		return -errno;
	error = move_stream(input, CONTROL_FD);
	if (!error)
		error = move_stream(output, ANSWER_FD);
	if (error)
		return error;
	answers_apart = !is_same_file(CONTROL_FD, ANSWER_FD);
	/* No CPU weight to write. Commands do not inherit our standard streams. */
	if (dup3(null, WEIGHT_FD, O_CLOEXEC) < 0 || dup3(events, OOM_FD, O_CLOEXEC) < 0 || dup2(null, 0) < 0 ||
	    dup2(null, 1) < 0 || dup2(null, 2) < 0)
		return -errno;
	return 0;
}

/* Without CAP_SYS_RESOURCE, prlimit needs a process whose group id is equal to all three of ours. So make them differ.
 * An exec gives commands the usual ids again. */
static void protect_limits(void)
{
	const gid_t other = 1;

	syscall(SYS_setresgid, (gid_t)-1, (gid_t)-1, other);
}

static int serve(bool among_others, int input, int output)
{
	const struct ready ready = {.version = PROTOCOL_VERSION, .activated = now(), .mounted = now()};
	sigset_t all;

	shares_pids = among_others;
	if (!is_remote && suid_dumpable_is_on()) {
		fputs("dutyfree-init: fs.suid_dumpable = 1 lets commands read init's memory: set it to 0 or 2\n", stderr);
		return 70;
	}
	protect_limits();
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0) {
		perror("dutyfree-init: cannot clear the dumpable flag");
		return 70;
	}
	int error = move_streams(input, output);
	if (error) {
		fprintf(stderr, "dutyfree-init: cannot prepare the streams: %s\n", strerror(-error));
		return 70;
	}
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	prctl(PR_SET_NAME, "dutyfree-init");
	umask(022);
	is_guest = true;
	process_choose_mark();
	oom_open();
	outbox_frame(FRAME_READY, 0, 0, &ready, sizeof ready, NULL, 0);
	init_run(-1, false);
}

int guest_run(bool has_socket)
{
	/* Signals to all processes mean those of the container, so it must be our own. */
	if (getpid() != 1) {
		fputs("dutyfree-init: guest must be PID 1 of a container\n", stderr);
		return 64;
	}
	return has_socket ? serve(false, CONTROL_FD, CONTROL_FD) : serve(false, 0, 1);
}

int guest_serve(bool among_others)
{
	return serve(among_others, 0, 1);
}
