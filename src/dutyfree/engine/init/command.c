/* Commands under way: their output, their time, their end. */
#define _GNU_SOURCE
#include "command.h"
#include "sys.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define COMMANDS 1024
#define TAIL_MAX (16u << 20)
#define SPEAKER_CREDIT (256u << 10)

static struct command *commands[COMMANDS];
static unsigned highest; /* no command beyond this index */
static int epoll, null = -1;
static bool late; /* some deadline is due, and what the owner may have said since was not heard yet */

void command_watch(int fd)
{
	epoll = fd;
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
}

static unsigned index_of(uint32_t id)
{
	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->id == id)
			return i;
	return COMMANDS;
}

static unsigned free_index(void)
{
	for (unsigned i = 0; i < COMMANDS; i++)
		if (!commands[i])
			return i;
	return COMMANDS;
}

static void listen_to(unsigned index, int number, bool on, int operation)
{
	struct stream *stream = &commands[index]->streams[number];
	struct epoll_event event = {.events = on ? EPOLLIN : 0, .data.u64 = EVENT_COMMANDS + index * 2 + (unsigned)number};

	stream->muted = !on;
	/* One that is not listened to must not wake us with its end either. */
	epoll_ctl(epoll, on ? operation : EPOLL_CTL_DEL, stream->fd, &event);
}

/* --- Output ------------------------------------------------------------------------------------------ */

void command_readable(unsigned index, int number)
{
	struct command *command = index < highest ? commands[index] : NULL;

	/* The event may be one of a command that ended in this same turn. */
	if (!command || command->streams[number].fd < 0 || command->streams[number].muted)
		return;
	if (output_wanted(command, &command->streams[number]))
		output_read(command, number);
	else
		listen_to(index, number, false, 0);
}

void command_read_on(void)
{
	for (unsigned i = 0; i < highest; i++)
		for (int number = 0; commands[i] && number < 2; number++) {
			struct stream *stream = &commands[i]->streams[number];
			if (stream->fd >= 0 && stream->muted && output_wanted(commands[i], stream))
				listen_to(i, number, true, EPOLL_CTL_ADD);
		}
}

int command_credit(uint32_t id, const char *payload, size_t size)
{
	unsigned index = index_of(id);
	uint32_t more;

	if (size != sizeof more)
		return -EPROTO;
	memcpy(&more, payload, sizeof more);
	if (index < COMMANDS) {
		commands[index]->credit += more;
		command_read_on();
	}
	return 0;
}

/* --- The end ---------------------------------------------------------------------------------------- */

static void forget(unsigned index)
{
	struct command *command = commands[index];

	for (int number = 0; number < 2; number++) {
		close_fd(&command->streams[number].fd);
		free(command->streams[number].buffer);
		free(command->streams[number].tail);
	}
	free(command);
	commands[index] = NULL;
	while (highest > 0 && !commands[highest - 1])
		highest--;
}

static void finish(unsigned index)
{
	struct command *command = commands[index];

	for (int number = 0; number < 2; number++)
		output_finish(command, number);
	if (command->worker) {
		int status = command->result.status;
		bool late_one = command->result.flags & EXIT_TIMED_OUT;
		outbox_done(command->id, WIFEXITED(status) ? WEXITSTATUS(status) : late_one ? ETIMEDOUT : EIO);
	} else {
		command->result.sent = now();
		outbox_frame(FRAME_EXIT, 0, command->id, &command->result, sizeof command->result, NULL, 0);
	}
	forget(index);
}

void command_reap(void)
{
	struct rusage usage;
	int status;

	for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
		for (unsigned i = 0; i < highest; i++) {
			if (!commands[i] || commands[i]->pid != pid)
				continue;
			struct exit *result = &commands[i]->result;
			result->status = status;
			result->ended = now();
			result->cpu_us = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000u +
					 (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
			result->peak_kb = (uint64_t)usage.ru_maxrss;
			finish(i);
			break;
		}
	}
}

static void kill_tree(struct command *command)
{
	if (command->worker)
		kill(command->pid, SIGKILL);
	else
		process_kill_marked(command->mark, 0);
}

void command_kill(uint32_t id, bool spare)
{
	unsigned index = index_of(id);

	/* It may have ended by itself: the owner has the result, or gets it soon. */
	if (index < COMMANDS && spare && !commands[index]->worker) {
		process_kill_marked(commands[index]->mark, commands[index]->pid);
	} else if (index < COMMANDS) {
		commands[index]->result.flags |= EXIT_KILLED;
		kill_tree(commands[index]);
	}
}

int command_signal_all(const char *payload, size_t size)
{
	uint32_t number;

	if (size != sizeof number)
		return -EPROTO;
	memcpy(&number, payload, sizeof number);
	if (number && number != SIGSTOP && number != SIGCONT && number != SIGKILL)
		return -EINVAL;
	/* 0 asks whether there is any. */
	return kill(-1, (int)number) < 0 && (errno != ESRCH || !number) ? -errno : 0;
}

int command_notify(uint32_t id, const char *payload, size_t size)
{
	unsigned index = index_of(id);
	uint32_t number;

	if (size != sizeof number)
		return -EPROTO;
	memcpy(&number, payload, sizeof number);
	/* It leads a session, and so a group, of its own; it is not reaped yet, so the number is its. */
	if (index < COMMANDS && !commands[index]->worker && number > 0 && number < 65)
		kill(-commands[index]->pid, (int)number);
	return 0;
}

int command_postpone(const char *payload, size_t size)
{
	uint64_t by;

	if (size != sizeof by)
		return -EPROTO;
	memcpy(&by, payload, sizeof by);
	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->deadline < UINT64_MAX - by)
			commands[i]->deadline += by;
	return 0;
}

bool command_running(void)
{
	return highest > 0;
}

uint64_t command_next(void)
{
	uint64_t first = UINT64_MAX;

	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->deadline < first)
			first = commands[i]->deadline;
	return first;
}

/* Of a command that is due, the owner may have postponed the deadline while all of us were frozen: what it
 * says is heard once more before. */
void command_deadlines(void)
{
	uint64_t next = command_next();

	if (next == UINT64_MAX || next > now()) {
		late = false;
		return;
	}
	if (!late) {
		late = true;
		return;
	}
	late = false;
	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->deadline != UINT64_MAX && commands[i]->deadline <= now()) {
			commands[i]->deadline = UINT64_MAX;
			commands[i]->result.flags |= EXIT_TIMED_OUT;
			kill_tree(commands[i]);
		}
}

/* --- The beginning ---------------------------------------------------------------------------------- */

/* Splits the strings of a frame; NULL if they are not exactly those it promises. */
static char **split(const struct exec *wanted, char *at, const char *end)
{
	size_t count = 2 + (size_t)wanted->argc + wanted->envc;
	char **strings;

	if (wanted->argc == 0 || wanted->argc > FRAME_MAX || wanted->envc > FRAME_MAX || count > (size_t)(end - at))
		return NULL;
	/* Two more: each list ends with a NULL. */
	strings = calloc(count + 2, sizeof *strings);
	for (size_t i = 0; strings && i < count; i++) {
		char *next = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
		if (!next) {
			free(strings);
			return NULL;
		}
		strings[i < 2 + (size_t)wanted->argc ? i : i + 1] = at;
		at = next + 1;
	}
	if (at != end) {
		free(strings);
		return NULL;
	}
	return strings;
}

/* Pipes for the next command, made while nobody waits for them. */
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
	open_pipe(0);
	open_pipe(1);
}

static int take_pipe(struct stream *stream, int number, int *theirs)
{
	int error = open_pipe(number);

	if (!error) {
		stream->fd = spare[number].ours;
		*theirs = spare[number].theirs;
		spare[number].ours = spare[number].theirs = -1;
	}
	return error;
}

static struct command *new_command(uint32_t id, unsigned *index)
{
	*index = free_index();
	struct command *command = *index < COMMANDS && index_of(id) == COMMANDS ? calloc(1, sizeof *command) : NULL;

	if (!command)
		return NULL;
	command->id = id;
	command->deadline = UINT64_MAX;
	command->streams[0].fd = command->streams[1].fd = -1;
	commands[*index] = command;
	if (*index >= highest)
		highest = *index + 1;
	return command;
}

/* With a terminal, that is all three of its streams, and its output is none of our business. */
static int begin(uint32_t id, char *payload, size_t size, int input, int terminal)
{
	struct exec wanted;
	uint64_t received = now();
	AUTOCLOSE int output = -1;
	AUTOCLOSE int errors = -1;
	unsigned index;

	if (size < sizeof wanted)
		return -EPROTO;
	memcpy(&wanted, payload, sizeof wanted);
	char **strings = split(&wanted, payload + sizeof wanted, payload + size);
	if (!strings || wanted.tail > TAIL_MAX) {
		free(strings);
		return -EPROTO;
	}
	struct command *command = new_command(id, &index);
	if (!command) {
		free(strings);
		return -EAGAIN;
	}
	command->wanted = wanted;
	command->credit = wanted.head;
	command->mark = process_mark();
	command->result.received = received;
	priority_begin(received);
	struct start start = {.user = strings[0],
			      .directory = strings[1],
			      .arguments = strings + 2,
			      .environment = strings + 2 + wanted.argc + 1,
			      .mark = command->mark};
	int error = terminal >= 0 ? 0 : take_pipe(&command->streams[0], 0, &output);
	if (!error && terminal < 0)
		error = take_pipe(&command->streams[1], 1, &errors);
	start.terminal = terminal >= 0;
	start.input = start.terminal ? terminal : input >= 0 ? input : null;
	start.output = start.terminal ? terminal : output;
	start.errors = start.terminal ? terminal : errors;
	command->result.spawning = now();
	if (error)
		start = (struct start){.flags = EXIT_NO_PROCESS, .error = -error};
	command->pid = error ? -1 : process_start(&start);
	/* We go on only after its exec, when it may well have ended: the time is its own. */
	command->result.running = start.executing ? start.executing : now();
	free(strings);
	if (command->pid < 0) {
		command->result.flags = start.flags;
		command->result.status = start.error;
		command->result.ended = command->result.running;
		close_fd(&output);
		close_fd(&errors);
		finish(index);
		return 0;
	}
	if (wanted.timeout && wanted.timeout < UINT64_MAX - received)
		command->deadline = received + wanted.timeout;
	for (int number = 0; number < 2 && terminal < 0; number++)
		listen_to(index, number, true, EPOLL_CTL_ADD);
	return 0;
}

int command_exec(uint32_t id, char *payload, size_t size, int input)
{
	return begin(id, payload, size, input, -1);
}

int command_terminal(uint32_t id, char *payload, size_t size, int terminal)
{
	return begin(id, payload, size, -1, terminal);
}

int command_speaker(uint32_t id, int (*body)(const char *argument, int fd), const char *argument, uint64_t timeout)
{
	AUTOCLOSE int theirs = -1;
	struct stream stream = {.fd = -1};
	int error = take_pipe(&stream, 0, &theirs);

	if (!error)
		error = command_worker(id, body, argument, theirs);
	if (error) {
		close_fd(&stream.fd);
		return error;
	}
	unsigned index = index_of(id);
	struct command *command = commands[index];
	command->streams[0].fd = stream.fd;
	command->wanted.flags = EXEC_STREAM;
	command->credit = SPEAKER_CREDIT;
	if (timeout && timeout < UINT64_MAX - now())
		command->deadline = now() + timeout;
	listen_to(index, 0, true, EPOLL_CTL_ADD);
	return 0;
}

int command_worker(uint32_t id, int (*body)(const char *path, int fd), const char *path, int fd)
{
	unsigned index;
	struct command *command = new_command(id, &index);

	if (!command)
		return -EAGAIN;
	command->worker = true;
	command->pid = fork_into(payload_group);
	if (command->pid == 0) {
		/* It has its own copy of everything but the one descriptor that it needs. */
		int kept = fd >= 0 ? dup2(fd, CONTROL_FD) : -1;
		syscall(SYS_close_range, kept >= 0 ? CONTROL_FD + 1 : CONTROL_FD, ~0u, 0);
		_exit(-body(path, kept));
	}
	if (command->pid < 0) {
		int error = command->pid;
		forget(index);
		return error;
	}
	return 0;
}
