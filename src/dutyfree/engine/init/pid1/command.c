/* Commands that run: their output, deadlines and end. */
#include "pid1/command.h"
#include "sys.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define COMMANDS_MAX 1024
#define STREAMER_CREDIT (256u << 10)
#define KILL_RETRY 250000000u /* nanoseconds between attempts to kill a command */

static struct command *commands[COMMANDS_MAX];
static unsigned highest; /* indexes from here on are free */
static int epoll;
static bool paused;  /* the owner has sent SIGSTOP to all processes */
static bool overdue; /* a deadline has passed, but a POSTPONE may still be unread */

void command_open(int fd)
{
	epoll = fd;
}

static unsigned index_of(uint32_t id)
{
	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->id == id)
			return i;
	return COMMANDS_MAX;
}

static unsigned free_index(void)
{
	for (unsigned i = 0; i < COMMANDS_MAX; i++)
		if (!commands[i])
			return i;
	return COMMANDS_MAX;
}

void command_watch_stream(unsigned index, int number, bool on, int operation)
{
	struct stream *stream = &commands[index]->streams[number];
	struct epoll_event event = {.events = on ? EPOLLIN : 0, .data.u64 = EVENT_COMMANDS + index * 2 + (unsigned)number};

	stream->unwatched = !on;
	/* Remove it from epoll: EPOLLHUP would be reported even without events. */
	epoll_ctl(epoll, on ? operation : EPOLL_CTL_DEL, stream->fd, &event);
}

/* --- Output -------------------------------------------------------------------------------------- */

void command_readable(unsigned index, int number)
{
	struct command *command = index < highest ? commands[index] : NULL;

	/* The command may have ended in this same turn. */
	if (!command || command->streams[number].fd < 0 || command->streams[number].unwatched)
		return;
	if (output_can_read(command, &command->streams[number]))
		output_read(command, number);
	else
		command_watch_stream(index, number, false, 0);
}

void command_resume_reading(void)
{
	for (unsigned i = 0; i < highest; i++)
		for (int number = 0; commands[i] && number < 2; number++) {
			struct stream *stream = &commands[i]->streams[number];
			if (stream->fd >= 0 && stream->unwatched && output_can_read(commands[i], stream))
				command_watch_stream(i, number, true, EPOLL_CTL_ADD);
		}
}

int command_credit(uint32_t id, const char *payload, size_t size)
{
	unsigned index = index_of(id);
	uint32_t more;

	if (size != sizeof more)
		return -EPROTO;
	memcpy(&more, payload, sizeof more);
	if (index < COMMANDS_MAX) {
		commands[index]->credit += more;
		command_resume_reading();
	}
	return 0;
}

/* --- End of a command ---------------------------------------------------------------------------- */

void command_forget(unsigned index)
{
	struct command *command = commands[index];

	for (int number = 0; number < 2; number++) {
		close_fd(&command->streams[number].fd);
		free(command->streams[number].buffer);
		free(command->streams[number].tail);
	}
	call_free(command->call);
	free(command);
	commands[index] = NULL;
	while (highest > 0 && !commands[highest - 1])
		highest--;
}

/* How a worker ended. Only something in the sandbox can have killed it, by hand or through its memory limit. */
static int worker_error(const struct command *command)
{
	int status = command->result.status;

	if (WIFEXITED(status))
		return WEXITSTATUS(status);
	if (command->result.flags & EXIT_TIMED_OUT)
		return ETIMEDOUT;
	return oom_report(command->oom) ? ENOMEM : ERROR_KILLED;
}

void command_finish(unsigned index)
{
	struct command *command = commands[index];

	call_service_ended(command->id);
	for (int number = 0; number < 2; number++)
		output_finish(command, number);
	if (command->worker) {
		outbox_done(command->id, worker_error(command));
	} else {
		if (oom_report(command->oom))
			command->result.flags |= EXIT_OOM;
		command->result.sent = now();
		outbox_frame(FRAME_EXIT, 0, command->id, &command->result, sizeof command->result, NULL, 0);
	}
	command_forget(index);
}

/* Root in the sandbox cannot trace a worker but can stop it, and the action would never end. So kill it. */
static void kill_stopped_workers(void)
{
	for (unsigned i = 0; i < highest && !paused; i++) {
		siginfo_t state = {0};
		if (commands[i] && commands[i]->worker &&
		    waitid(P_PID, (id_t)commands[i]->pid, &state, WSTOPPED | WNOHANG) == 0 && state.si_pid)
			kill(commands[i]->pid, SIGKILL);
	}
}

void command_reap(void)
{
	struct rusage usage;
	int status;

	for (pid_t pid; (pid = wait4(-1, &status, WNOHANG, &usage)) > 0;) {
		call_reaped(pid);
		for (unsigned i = 0; i < highest; i++) {
			if (!commands[i] || commands[i]->pid != pid)
				continue;
			if (call_retry(commands[i]))
				break;
			struct exit *result = &commands[i]->result;
			result->status = status;
			result->ended = now();
			result->cpu_us = (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000u +
					 (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
			result->peak_kb = (uint64_t)usage.ru_maxrss;
			command_finish(i);
			break;
		}
	}
	kill_stopped_workers();
}

static void kill_tree(unsigned index)
{
	struct command *command = commands[index];

	/* Death takes time, and a tracer can hide it from us. Try again until we have reaped it. */
	command->deadline = now() + KILL_RETRY;
	if (command->call && !command->pid) { /* a call without a fork: no process will be started */
		command->result.status = SIGKILL;
		command->result.spawning = command->result.running = command->result.ended = now();
		command_finish(index);
	} else if (command->worker) {
		kill(command->pid, SIGKILL);
	} else {
		process_kill_marked(command->mark, 0);
	}
}

void command_kill(uint32_t id, bool spare)
{
	unsigned index = index_of(id);

	/* It may have ended already; then its result is on the way. */
	if (index < COMMANDS_MAX && spare && !commands[index]->worker && commands[index]->pid) {
		process_kill_marked(commands[index]->mark, commands[index]->pid);
	} else if (index < COMMANDS_MAX) {
		commands[index]->result.flags |= EXIT_KILLED;
		kill_tree(index);
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
	if (number == SIGSTOP || number == SIGCONT)
		paused = number == SIGSTOP;
	if (shares_pids)
		return process_signal_descendants((int)number) || number ? 0 : -ESRCH;
	/* Signal 0 asks whether there is any process. */
	return kill(-1, (int)number) < 0 && (errno != ESRCH || !number) ? -errno : 0;
}

int command_signal(uint32_t id, const char *payload, size_t size)
{
	unsigned index = index_of(id);
	uint32_t number;

	if (size != sizeof number)
		return -EPROTO;
	memcpy(&number, payload, sizeof number);
	/* The command leads its own process group. It is not reaped yet, so the pid is still its own. */
	if (index < COMMANDS_MAX && !commands[index]->worker && commands[index]->pid > 0 && number > 0 && number < 65)
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

void command_adopted(void)
{
	uint32_t ids[COMMANDS_MAX], count = 0;

	for (unsigned i = 0; i < highest; i++)
		if (commands[i]) {
			ids[count++] = commands[i]->id;
			/* The former owner took output with it, and the credit that it would have given back. */
			commands[i]->credit = commands[i]->worker ? STREAMER_CREDIT : commands[i]->request.head;
		}
	outbox_frame(FRAME_ADOPTED, 0, 0, ids, count * sizeof *ids, NULL, 0);
	command_resume_reading();
}

bool command_running(void)
{
	return highest > 0;
}

uint64_t command_next_deadline(void)
{
	uint64_t first = UINT64_MAX;

	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->deadline < first)
			first = commands[i]->deadline;
	return first;
}

/* The sandbox may have been frozen, and the owner may have postponed the deadlines. Read its frames once more before
 * killing. */
void command_deadlines(void)
{
	uint64_t next = command_next_deadline();

	if (next == UINT64_MAX || next > now()) {
		overdue = false;
		return;
	}
	if (!overdue) {
		overdue = true;
		return;
	}
	overdue = false;
	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && commands[i]->deadline != UINT64_MAX && commands[i]->deadline <= now()) {
			if (!(commands[i]->result.flags & EXIT_KILLED))
				commands[i]->result.flags |= EXIT_TIMED_OUT;
			kill_tree(i);
		}
}

/* --- Start of a command -------------------------------------------------------------------------- */

struct command *command_new(uint32_t id, unsigned *index)
{
	*index = free_index();
	bool is_new = *index < COMMANDS_MAX && index_of(id) == COMMANDS_MAX;
	struct command *command = is_new ? calloc(1, sizeof *command) : NULL;

	if (!command)
		return NULL;
	command->id = id;
	command->oom = oom_reported();
	command->deadline = UINT64_MAX;
	command->streams[0].fd = command->streams[1].fd = -1;
	commands[*index] = command;
	if (*index >= highest)
		highest = *index + 1;
	return command;
}

/* Start a worker: a fork of init. exec.c starts programs. */
int command_worker(uint32_t id, int (*body)(const char *path, int fd), const char *path, int fd)
{
	unsigned index;
	struct command *command = command_new(id, &index);

	if (!command)
		return -EAGAIN;
	command->worker = true;
	command->pid = fork_into(payload_group);
	if (command->pid == 0) {
		/* Close all descriptors but the one that it needs. */
		int kept = fd >= 0 ? dup2(fd, CONTROL_FD) : -1;
		close_from(kept >= 0 ? CONTROL_FD + 1 : CONTROL_FD);
		_exit(-body(path, kept));
	}
	if (command->pid < 0) {
		int error = command->pid;
		command_forget(index);
		return error;
	}
	return 0;
}

int command_streamer(uint32_t id, int (*body)(const char *argument, int fd), const char *argument, uint64_t timeout)
{
	AUTOCLOSE int theirs = -1;
	struct stream stream = {.fd = -1};
	int error = command_pipe(&stream, 0, &theirs);

	if (!error)
		error = command_worker(id, body, argument, theirs);
	if (error) {
		close_fd(&stream.fd);
		return error;
	}
	unsigned index = index_of(id);
	struct command *command = commands[index];
	command->streams[0].fd = stream.fd;
	command->request.flags = EXEC_STREAM;
	command->credit = STREAMER_CREDIT;
	if (timeout && timeout < UINT64_MAX - now())
		command->deadline = now() + timeout;
	command_watch_stream(index, 0, true, EPOLL_CTL_ADD);
	return 0;
}

/* --- Calls of services (service_calls.c) --------------------------------------------------------- */

struct command *command_oldest_call(uint32_t service)
{
	struct command *oldest = NULL;

	for (unsigned i = 0; i < highest; i++) {
		struct command *one = commands[i];
		if (one && one->call && !one->pid && one->call->service == service &&
		    (!oldest || one->result.received < oldest->result.received))
			oldest = one;
	}
	return oldest;
}

void command_fail(struct command *command, int error)
{
	outbox_done(command->id, error);
	command_forget(index_of(command->id));
}

bool command_exists(uint32_t id, pid_t pid)
{
	for (unsigned i = 0; i < highest; i++)
		if (commands[i] && (commands[i]->id == id || (pid > 0 && commands[i]->pid == pid)))
			return true;
	return false;
}

pid_t command_pid(uint32_t id)
{
	unsigned index = index_of(id);

	return index < COMMANDS_MAX ? commands[index]->pid : 0;
}
