/* Start a command that runs a program: parse the frame, create pipes, start the process. */
#include "pid1/command.h"
#include "sys.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

#define TAIL_MAX (16u << 20)

static int null = -1; /* /dev/null, stdin of a command that has none */

/* Split the strings of a frame. NULL if their number does not match. */
static char **split(const struct exec *request, char *at, const char *end)
{
	size_t count = 2 + (size_t)request->argc + request->envc;
	char **strings;

	if (request->argc == 0 || request->argc > FRAME_MAX || request->envc > FRAME_MAX || count > (size_t)(end - at))
		return NULL;
	/* Two more: argv and envp end with NULL. */
	strings = calloc(count + 2, sizeof *strings);
	for (size_t i = 0; strings && i < count; i++) {
		char *next = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
		if (!next) {
			free(strings);
			return NULL;
		}
		strings[i < 2 + (size_t)request->argc ? i : i + 1] = at;
		at = next + 1;
	}
	if (at != end) {
		free(strings);
		return NULL;
	}
	return strings;
}

/* Pipes for the next command, created while we are idle. */
static struct {
	int ours, theirs;
} spare[2] = {{-1, -1}, {-1, -1}};

static int open_pipe(int number)
{
	int ends[2];

	if (spare[number].ours >= 0)
		return 0;
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	fcntl(ends[0], F_SETFL, O_NONBLOCK);
	spare[number].ours = ends[0];
	spare[number].theirs = ends[1];
	return 0;
}

void command_prepare(void)
{
	if (null < 0)
		null = open("/dev/null", O_RDWR | O_CLOEXEC);
	open_pipe(0);
	open_pipe(1);
}

int command_pipe(struct stream *stream, int number, int *theirs)
{
	int error = open_pipe(number);

	if (!error) {
		stream->fd = spare[number].ours;
		*theirs = spare[number].theirs;
		spare[number].ours = spare[number].theirs = -1;
	}
	return error;
}

/* A terminal replaces all three streams, and init does not read its output. */
static int begin(uint32_t id, char *payload, size_t size, int input, int terminal, int socket)
{
	struct exec request;
	uint64_t received = now();
	AUTOCLOSE int output = -1;
	AUTOCLOSE int errors = -1;
	unsigned index;

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	char **strings = split(&request, payload + sizeof request, payload + size);
	if (!strings || request.tail > TAIL_MAX) {
		free(strings);
		return -EPROTO;
	}
	struct command *command = command_new(id, &index);
	if (!command) {
		free(strings);
		return -EAGAIN;
	}
	command->request = request;
	command->credit = request.head;
	command->mark = process_mark();
	command->result.received = received;
	priority_begin(received);
	struct start start = {.user = strings[0],
			      .directory = strings[1],
			      .arguments = strings + 2,
			      .environment = strings + 2 + request.argc + 1,
			      .mark = command->mark};
	int error = terminal >= 0 ? 0 : command_pipe(&command->streams[0], 0, &output);
	if (!error && terminal < 0)
		error = command_pipe(&command->streams[1], 1, &errors);
	start.terminal = terminal >= 0;
	start.socket = socket;
	start.input = start.terminal ? terminal : input >= 0 ? input : null;
	start.output = start.terminal ? terminal : output;
	start.errors = start.terminal ? terminal : errors;
	command->result.spawning = now();
	if (error)
		start = (struct start){.flags = EXIT_NO_PROCESS, .error = -error};
	command->pid = error ? -1 : process_start(&start);
	/* We continue after the exec, when the command may have ended already. So take the time that the child noted. */
	command->result.running = start.executing ? start.executing : now();
	free(strings);
	if (command->pid < 0) {
		command->result.flags = start.flags;
		command->result.status = start.error;
		command->result.ended = command->result.running;
		close_fd(&output);
		close_fd(&errors);
		command_finish(index);
		return 0;
	}
	if (request.timeout && request.timeout < UINT64_MAX - received)
		command->deadline = received + request.timeout;
	for (int number = 0; number < 2 && terminal < 0; number++)
		command_watch_stream(index, number, true, EPOLL_CTL_ADD);
	return 0;
}

int command_exec(uint32_t id, char *payload, size_t size, int input)
{
	return begin(id, payload, size, input, -1, 0);
}

/* Start a command in its own terminal (pty). The owner gets the master side and reads, writes and resizes it directly,
 * so nothing about a terminal can block init. When the owner closes it, the kernel sends SIGHUP. */
int command_terminal(uint32_t id, char *payload, size_t size)
{
	struct window request;
	int unlocked = 0;

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	const struct winsize window = {.ws_row = request.rows, .ws_col = request.columns};
	/* Non-blocking for the owner too: the flag belongs to the open file. */
	int ours = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (ours < 0)
		return -errno;
	/* Not by path, which the sandbox could have replaced: TIOCGPTPEER opens the slave side of this very terminal. */
	AUTOCLOSE int theirs = -1;
	if (ioctl(ours, TIOCSPTLCK, &unlocked) == 0 && ioctl(ours, TIOCSWINSZ, &window) == 0)
		theirs = ioctl(ours, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (theirs < 0) {
		int error = -errno;
		close(ours);
		return error;
	}
	outbox_frame_fd(FRAME_STARTED, 0, id, NULL, 0, ours);
	return begin(id, payload + sizeof request, size - sizeof request, -1, theirs, 0);
}

int command_service(uint32_t id, char *payload, size_t size, int input, int socket)
{
	return begin(id, payload, size, input, -1, socket);
}

int command_call(uint32_t id, char *payload, size_t size, struct call *call)
{
	struct exec request;
	uint64_t received = now();
	unsigned index;

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	char **strings = split(&request, payload + sizeof request, payload + size);
	free(strings);
	if (!strings || request.tail > TAIL_MAX)
		return -EPROTO;
	struct command *command = command_new(id, &index);
	if (!command)
		return -EAGAIN;
	command->request = request;
	command->credit = request.head;
	command->result.received = command->result.spawning = received;
	priority_begin(received);
	for (int number = 0; number < 2; number++) {
		int error = command_pipe(&command->streams[number], number, &call->descriptors[1 + number]);
		if (error) {
			command_forget(index);
			return error;
		}
		command_watch_stream(index, number, true, EPOLL_CTL_ADD);
	}
	if (request.timeout && request.timeout < UINT64_MAX - received)
		command->deadline = received + request.timeout;
	command->call = call;
	return 0;
}

int command_null_fd(void)
{
	return null;
}
