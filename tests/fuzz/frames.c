/* Init's frames, through its own socket, without real processes. The first three bytes of the input: how many
 * descriptors to send, the size of the pieces in units of 16 bytes, and flags: whether commands end meanwhile, and
 * whether init is a guest. Then the stream. */
#include "pid1/init.c"
#include "pid1/frame_queue.c"
#include "jail.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define PROCESSES 4096

static int owner;
static size_t answered; /* frames of this input that were answered */
static jmp_buf gone;
static pid_t last_pid = NOBODY_PID;
static struct {
	pid_t pid;
	int status;
} ended[PROCESSES];
static unsigned ended_count;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	int pair[2], room = 8 << 20;

	(void)argc, (void)argv;
	jail_enter();
	jail_terminals();
	signal(SIGPIPE, SIG_IGN); /* a guest blocks it */
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		abort();
	owner = fcntl(pair[0], F_DUPFD_CLOEXEC, 64);
	int ours = fcntl(pair[1], F_DUPFD_CLOEXEC, 64);
	close(pair[0]);
	close(pair[1]);
	if (owner < 0 || ours < 0 || dup3(ours, CONTROL_FD, O_CLOEXEC) < 0 || dup3(ours, ANSWER_FD, O_CLOEXEC) < 0 ||
	    fcntl(CONTROL_FD, F_SETFL, O_NONBLOCK) < 0)
		abort();
	close(ours);
	setsockopt(CONTROL_FD, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
	setsockopt(owner, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
	epoll = epoll_create1(EPOLL_CLOEXEC);
	command_open(epoll);
	call_open(epoll);
	input_open_table(epoll);
	return 0;
}

/* --- Replaces processes -------------------------------------------------------------------------- */

static pid_t pretend(int status)
{
	require(ended_count < PROCESSES, "the number of processes is bounded");
	ended[ended_count].pid = ++last_pid;
	ended[ended_count++].status = status;
	return last_pid;
}

pid_t __wrap_fork_into(int group);
pid_t __wrap_fork_into(int group)
{
	(void)group;
	return pretend(last_pid % 3 ? 0 : ENOENT << 8);
}

/* A program that prints its arguments, and its environment to stderr. One with "!" cannot be started. */
pid_t __wrap_process_start(struct start *start);
pid_t __wrap_process_start(struct start *start)
{
	size_t said = strlen(start->user) + strlen(start->directory);

	for (char *const *at = start->arguments; *at && said < 32768; at++) {
		said += strlen(*at);
		if (!start->terminal && write(start->output, *at, strnlen(*at, 8192)) < 0)
			break;
	}
	for (char *const *at = start->environment; *at && said < 65536; at++) {
		said += strlen(*at);
		if (!start->terminal && write(start->errors, *at, strnlen(*at, 4096)) < 0)
			break;
	}
	if (start->arguments[0][0] == '!') {
		start->flags = EXIT_NOT_STARTED;
		start->error = ENOENT;
		return -1;
	}
	start->executing = now();
	return pretend(said % 2 ? 0 : 1 << 8);
}

void __wrap_process_kill_marked(uint64_t mark, pid_t spared);
void __wrap_process_kill_marked(uint64_t mark, pid_t spared)
{
	(void)mark, (void)spared;
}

int __wrap_kill(pid_t pid, int number);
int __wrap_kill(pid_t pid, int number)
{
	require(pid == -1 || pid > NOBODY_PID || pid < -NOBODY_PID, "signals go only to started processes");
	(void)number;
	return 0;
}

pid_t __wrap_wait4(pid_t pid, int *status, int options, struct rusage *usage);
pid_t __wrap_wait4(pid_t pid, int *status, int options, struct rusage *usage)
{
	(void)pid, (void)options;
	memset(usage, 0, sizeof *usage);
	if (ended_count == 0)
		return 0;
	*status = ended[--ended_count].status;
	return ended[ended_count].pid;
}

_Noreturn void __wrap__exit(int status);
_Noreturn void __wrap__exit(int status)
{
	require(status == 65, "init exits only because of a frame that is too large");
	longjmp(gone, 1);
}

/* --- Replaces the owner -------------------------------------------------------------------------- */

/* Read what init sends. It must be whole frames. */
static void read_answers(void)
{
	static char heard[1 << 16];
	static struct frame head;
	static size_t head_have, body_left;
	int fds[FDS];
	size_t count;

	for (;;) {
		ssize_t size = receive_message(owner, heard, sizeof heard, MSG_DONTWAIT, fds, FDS, &count);
		if (size <= 0)
			break;
		require(count <= 1, "one descriptor per frame");
		if (count)
			close(fds[0]);
		for (ssize_t at = 0; at < size;) {
			if (body_left) {
				size_t step = body_left < (size_t)(size - at) ? body_left : (size_t)(size - at);
				body_left -= step;
				at += (ssize_t)step;
				continue;
			}
			((char *)&head)[head_have++] = heard[at++];
			if (head_have < sizeof head)
				continue;
			require(head.kind >= FRAME_OUTPUT && head.kind <= FRAME_TAKEN && head.size <= FRAME_MAX,
				"init sends valid frames");
			answered += head.kind == FRAME_EXIT || head.kind == FRAME_DONE;
			head_have = 0;
			body_left = head.size;
		}
	}
	require(outbox_size() || (!head_have && !body_left), "frames are complete");
}

static void turn(bool reaping)
{
	struct epoll_event events[16];

	serve();
	command_prepare();
	int count = epoll_wait(epoll, events, 16, 0);
	for (int i = 0; i < count; i++) {
		uint64_t what = events[i].data.u64;
		if (what >= EVENT_INPUTS)
			input_event(what - EVENT_INPUTS, events[i].events);
		else if (what >= EVENT_CALLS)
			call_event(what - EVENT_CALLS);
		else
			command_readable((unsigned)((what - EVENT_COMMANDS) / 2), (int)(what - EVENT_COMMANDS) % 2);
	}
	if (reaping)
		command_reap();
	command_deadlines();
	read_answers();
}

static void send_piece(const uint8_t *data, size_t size, int descriptors)
{
	int fds[4];

	descriptors %= 4;
	for (int i = 0; i < descriptors; i++)
		fds[i] = jail_memory("given\n", 6);
	send_message(owner, data, size, NULL, 0, fds, descriptors);
	for (int i = 0; i < descriptors; i++)
		close(fds[i]);
}

static void feed(const uint8_t *data, size_t size)
{
	size_t piece = data[1] ? data[1] * 16u : SMALL;
	bool reaping = data[2] & 1;
	int descriptors = data[2] & 2 ? 0 : data[0];

	is_guest = data[2] & 2;

	data += 3;
	size -= 3;
	if (setjmp(gone)) {
		have = 0; /* drop what init read last, and what it did not read */
		while (recv(CONTROL_FD, small, sizeof small, MSG_DONTWAIT) > 0)
			;
		return;
	}
	while (size > 0) {
		size_t part = size < piece ? size : piece;
		send_piece(data, part, descriptors);
		descriptors = 0;
		data += part;
		size -= part;
		/* Until init has read all. */
		for (size_t before = have + 1; before != have || has_work() || outbox_full();) {
			before = have;
			receive();
			if (has_work() || outbox_full())
				turn(reaping);
		}
		turn(reaping);
	}
}

/* End all commands and handle all queued frames. */
static void settle_all(void)
{
	while (command_running() || has_whole_frame() || queue_ready())
		turn(true);
	/* Some wait for frames that are never answered. */
	while (first)
		queue_cancel(first->head.id);
	queue_note_latest(0);
	outbox_flush();
	read_answers();
	while (received_count > 0)
		close(received_fds[--received_count]);
	if (inbox != small)
		munmap(inbox, space + 1);
	inbox = small;
	space = sizeof small - 1;
	have = 0;
}

/* Every frame is answered once. Some kinds are answered only on an error. */
static void check_answers(const uint8_t *data, size_t size)
{
	size_t most = 0, least = 0;
	struct frame head;

	for (; size >= sizeof head; data += sizeof head + head.size, size -= sizeof head + head.size) {
		memcpy(&head, data, sizeof head);
		if (head.size > FRAME_MAX || size - sizeof head < head.size)
			break;
		most++;
		least += head.kind != FRAME_KILL && head.kind != FRAME_CREDIT && head.kind != FRAME_SIGNAL_COMMAND &&
			 head.kind != FRAME_POSTPONE && head.kind != FRAME_BACKGROUND && head.kind != FRAME_INPUT;
	}
	require(answered >= least, "every frame is answered");
	require(answered <= most, "no frame is answered twice");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 3)
		return 0;
	mkdir("d", 0755);
	jail_file("f", "one\ntwo\nthree\n", 14);
	if (truncate("f", 14) < 0 || symlink("f", "link") < 0)
		abort();
	jail_file("large", "", 0);
	if (truncate("large", INLINE_MAX + 1) < 0)
		abort();
	answered = 0;
	feed(data, size);
	settle_all();
	check_answers(data + 3, size - 3);
	ended_count = 0;
	jail_empty();
	return 0;
}
