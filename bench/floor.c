/* The floor: the time that the kernel alone needs for a sandbox and its first command, without Python, the protocol and
 * everything else that could be saved. It uses the engine's own set-up (setup/sandbox.c and what it needs) between two
 * minimal ends: one process that clones, and a PID 1 that runs one program and sends one byte.
 *
 *   floor SKELETON STATIC    reads letters, and answers each with two numbers of nanoseconds:
 *                            from the start to the result, and until everything is removed
 *   v V   a program on the host, started with vfork: dynamic, static
 *   p P   a sandbox from prepared parts: dynamic program, static program
 *   f F   a sandbox from new parts: dynamic program, static program */
#include "launcher/disk.h"
#include "launcher/fd_handover.h"
#include "launcher/layers.h"
#include "launcher/parked.h"
#include "launcher/sandboxes.h"
#include "launcher/slot.h"
#include "pid1/command.h"
#include "setup/sandbox.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static struct create spec = {.trees = 2,
			       .memory = 4ull << 30,
			       .disk = 2ull << 30,
			       .pids = 2048,
			       .tree = {{.count = 1}, {.mountpoint = "usr", .count = 1}},
			       .places = 2,
			       .place = {{"workspace", PLACE_PLAIN}, {"tmp", PLACE_PLAIN}}};
static const char *program;

static _Noreturn void die(const char *what)
{
	perror(what);
	_exit(1);
}

/* --- On the host --------------------------------------------------------------------------------- */

static int run(void *unused)
{
	(void)unused;
	execve(program, (char *[]){(char *)program, NULL}, (char *[]){NULL});
	_exit(127);
}

static uint64_t on_host(void)
{
	int status;
	uint64_t begin = now();
	pid_t pid = spawn_child(run, NULL, -1);

	if (pid < 0 || waitpid(pid, &status, 0) < 0 || status)
		die("host");
	return now() - begin;
}

/* --- In a sandbox -------------------------------------------------------------------------------- */

int payload_group = -1;

/* The guest's side of init. There is no guest here. */
bool answers_apart;

/* The launcher's side of sandboxes on disk. There are none here. */
int launcher_epoll = -1;

void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count)
{
	(void)serial, (void)error, (void)value, (void)text, (void)size, (void)fds, (void)count;
	die("reply");
}

void refuse(uint32_t serial, int error, const char *step)
{
	(void)serial, (void)error;
	die(step);
}

void sandbox_disk_made(uint64_t size, int error, const char *step)
{
	(void)size, (void)error;
	die(step);
}

void owner_deaf(void)
{
	_exit(0);
}

/* PID 1: start one program with pipes, as the engine does, and send one byte when it has ended. */
_Noreturn void init_run(int payload, bool kept)
{
	(void)kept;
	char *arguments[] = {(char *)program, NULL}, *environment[] = {"PATH=/usr/bin:/bin", NULL};
	int output[2], errors[2], null = open("/dev/null", O_RDWR | O_CLOEXEC), status;
	struct start start = {.user = "", .directory = "", .arguments = arguments, .environment = environment};

	payload_group = payload;
	if (pipe2(output, O_CLOEXEC) < 0 || pipe2(errors, O_CLOEXEC) < 0)
		_exit(2);
	start.mark = process_mark();
	start.input = null;
	start.output = output[1];
	start.errors = errors[1];
	pid_t pid = process_start(&start);
	if (pid < 0 || wait4(pid, &status, 0, NULL) != pid || status || write(CONTROL_FD, "", 1) != 1)
		_exit(3);
	for (;;)
		pause();
}

static void in_sandbox(bool fresh, uint64_t *result, uint64_t *gone)
{
	static struct activation activation;
	char answer[sizeof(struct frame) + sizeof(struct ready) + 1];
	uint64_t begin = now();
	struct slot *slot = fresh ? slot_create() : slot_take();
	AUTOCLOSE int kept = -1;

	activation.spec = spec;
	if (!slot || cgroup_set_limits(&slot->cgroup, &spec) < 0 || parked_create(slot) < 0)
		die("parts");
	AUTOCLOSE int upper = upper_create(&spec, &kept);
	if (upper < 0 || parked_activate(slot, &activation, upper) < 0)
		die("order");
	if (recv(slot->socket, answer, sizeof answer, MSG_WAITALL) != sizeof answer)
		die("result");
	*result = now() - begin;
	parked_kill(slot);
	if (fresh)
		slot_destroy(slot);
	else
		slot_return(slot);
	*gone = now() - begin;
}

static uint32_t skeleton(const char *path)
{
	int layer = layer_add_host(path);

	if (layer < 0) {
		errno = -layer;
		die(path);
	}
	return (uint32_t)layer;
}

int main(int argc, char **argv)
{
	int owner = open("/dev/null", O_RDONLY | O_CLOEXEC);
	sigset_t all;

	if (argc != 3)
		return 64;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	int error = handover_open(&owner), proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (error || proc < 0 || cgroup_open(proc) || slot_open(proc))
		die("parts of the host");
	/* A fork stays outside the sandbox set-up for measurements on the host. */
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		die("socket");
	pid_t host = fork();
	if (host == 0) {
		char letter;
		close(pair[0]);
		while (read(pair[1], &letter, 1) == 1) {
			program = letter == 'V' ? argv[2] : "/usr/bin/true";
			uint64_t taken = on_host();
			if (write(pair[1], &taken, sizeof taken) != sizeof taken)
				break;
		}
		_exit(0);
	}
	if (layers_open(proc))
		die("layers");
	setup_prepare(proc);
	seccomp_prepare();
	spec.tree[0].layers[0] = skeleton(argv[1]);
	spec.tree[1].layers[0] = skeleton("/usr");
	slot_return(slot_create());
	for (int letter; (letter = getchar()) != EOF;) {
		uint64_t result = 0, gone = 0;
		char request = (char)letter;
		program = letter == 'p' || letter == 'f' ? "/usr/bin/true" : "/static-true";
		if (letter == 'v' || letter == 'V') {
			if (write(pair[0], &request, 1) != 1 || read(pair[0], &result, sizeof result) != sizeof result)
				die("host");
			gone = result;
		} else if (strchr("pPfF", letter)) {
			in_sandbox(letter == 'f' || letter == 'F', &result, &gone);
		} else {
			continue;
		}
		printf("%llu %llu\n", (unsigned long long)result, (unsigned long long)gone);
		fflush(stdout);
	}
	close(pair[0]);
	waitpid(host, NULL, 0);
	cgroup_close();
	return 0;
}
