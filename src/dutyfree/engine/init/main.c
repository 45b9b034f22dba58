/* dutyfree-init: the one C program of the engine. Each owner starts it once, as "dutyfree-init
 * launcher FD[:WALLS]"; WALLS is a sum of enum wall. In a container of another runtime it is PID 1, as "dutyfree-init
 * guest"; in a pod it is PID 1 as "dutyfree-init pod", which "dutyfree-init join" gives a stream; on a machine that is
 * reached by ssh it is "dutyfree-init remote BASE NAME"; in a virtual machine it is the kernel's first process, as
 * "dutyfree-init machine". As "dutyfree-init bundle ..." it mounts the root of a container and executes a runtime.
 *
 * Rooms: launcher/ creates sandboxes; setup/ turns a clone of the launcher into a sandbox; pid1/ is init, PID 1 of a
 * sandbox; egress/ makes network connections for sandboxes. protocol.h is what the owner and this program send to each
 * other. Start reading at launcher/launcher.c. */
#include "launcher/launcher.h"
#include "launcher/title.h"
#include "protocol.h"
#include "setup/bundle.h"
#include "setup/guest.h"
#include "setup/machine.h"
#include "setup/pod.h"
#include "setup/remote.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* Re-execute a sealed memfd copy of this program, so that a sandbox that gets hold of our /proc/PID/exe cannot change
 * the file on the host (CVE-2019-5736). Returns 0 in the copy, or -errno. */
static int reexec_sealed_copy(char **argv)
{
	AUTOCLOSE int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	AUTOCLOSE int copy = -1;
	struct stat found;

	if (self < 0)
		return -errno;
	int seals = fcntl(self, F_GET_SEALS);
	if (seals >= 0 && (seals & SEALS) == SEALS)
		return 0;
	copy = memfd_create("dutyfree-init", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (copy < 0 || fstat(self, &found) < 0)
		return -errno;
	for (off_t left = found.st_size; left > 0;) {
		ssize_t count = sendfile(copy, self, NULL, (size_t)left);
		if (count <= 0)
			return count ? -errno : -EIO;
		left -= count;
	}
	if (fchmod(copy, 0500) < 0 || fcntl(copy, F_ADD_SEALS, SEALS) < 0)
		return -errno;
	/* argv[0] is a fixed name, because every sandbox can read it. */
	fexecve(copy, (char *[]){"dutyfree-init", argv[1], argv[2], (char *)title_placeholder, NULL}, (char *[]){NULL});
	return -errno;
}

/* An owner that nohup or a script started in the background ignores SIGHUP or SIGINT. Commands in a sandbox would
 * inherit that, and no shell in there could trap these signals. */
static void reset_signals(void)
{
	static const uint64_t none[8]; /* as struct sigaction: SIG_DFL; as a signal set: empty */

	/* The raw system call: sigaction() of the C library refuses the signals that it uses itself. */
	for (int number = 1; number <= 64; number++)
		syscall(SYS_rt_sigaction, number, none, NULL, sizeof *none);
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, none, NULL, sizeof *none);
}

int main(int argc, char **argv)
{
	char *end;

	if (argc == 2 && strcmp(argv[1], "version") == 0) {
		printf("protocol %d, seccomp filter of %u instructions\n", PROTOCOL_VERSION, seccomp_prepare());
		return 0;
	}
	if (argc >= 2 && argc <= 3 && strcmp(argv[1], "guest") == 0) {
		reset_signals();
		return guest_run(argc == 3); /* "guest 3" */
	}
	if (argc == 2 && strcmp(argv[1], "machine") == 0) {
		reset_signals();
		return machine_run();
	}
	if (argc == 2 && strcmp(argv[1], "tsc") == 0)
		return machine_print_tsc();
	if (argc == 2 && strcmp(argv[1], "pod") == 0) {
		reset_signals();
		return pod_run();
	}
	if (argc == 2 && strcmp(argv[1], "join") == 0)
		return pod_join();
	if (argc == 4 && strcmp(argv[1], "remote") == 0) {
		reset_signals();
		return remote_run(argv[2], argv[3]);
	}
	if (argc >= 2 && strcmp(argv[1], "bundle") == 0)
		return bundle_run(argc - 2, argv + 2);
	if (argc < 3 || argc > 4 || strcmp(argv[1], "launcher") != 0) {
		fputs("usage: dutyfree-init launcher FD[:WALLS] | guest [3] | pod | join | machine | remote BASE NAME | bundle ... | "
		      "tsc | version\n",
		      stderr);
		return 64;
	}
	long socket = strtol(argv[2], &end, 10);
	unsigned long without = *end == ':' ? strtoul(end + 1, &end, 10) : 0;
	if (*end || socket < 3 || socket > INT_MAX || without > WALLS_ALL) {
		fputs("dutyfree-init: FD is not the number of an inherited descriptor\n", stderr);
		return 64;
	}
	int error = reexec_sealed_copy(argv);
	if (error) {
		fprintf(stderr, "dutyfree-init: cannot make a sealed copy of itself: %s\n", strerror(-error));
		return 70;
	}
	reset_signals();
	title_init(argc, argv);
	launcher_run((int)socket, (unsigned)without);
}
