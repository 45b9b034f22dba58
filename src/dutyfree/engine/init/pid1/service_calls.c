/* Commands that are forks of a process that runs already: a service, such as an interpreter with its modules loaded.
 *
 * The service has a socket to us. One fork is asked for ahead of time, with a socket of its own. The service forks
 * twice, so that the fork becomes our child; that leads a session, and says so. What we believe is what the kernel
 * tells: who said it, and that it is our child. Then it gets a mark from us, and from then on it is a command like
 * any other: handed its streams and what to do, killed by its mark, and reaped by us. */
#define _GNU_SOURCE
#include "pid1/command.h"
#include "sys.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SERVERS 16
#define TRIES 3 /* of a call, and of forks in a row, before it is given up */

struct server {
	uint32_t id; /* of the command that it is; 0 for none */
	int socket;
	int fork;      /* the socket of the fork that was asked for, -1 for none */
	pid_t pid;     /* of the fork, once it is ready; else 0 */
	uint64_t mark; /* that it has, or will get */
	unsigned failures; /* forks in a row that came to nothing */
};

static struct server servers[SERVERS];
static int epoll;

void calls_watch(int fd)
{
	epoll = fd;
}

static struct server *find(uint32_t id)
{
	for (struct server *server = servers; server < servers + SERVERS; server++)
		if (server->id == id)
			return server;
	return NULL;
}

static int open_pair(int ends[2])
{
	return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0 ? -errno : 0;
}

/* --- Forks ahead of time ------------------------------------------------------------------------------ */

/* Nobody has been told what to do yet: it is of no use to anyone. */
static void drop_fork(struct server *server)
{
	close_fd(&server->fork);
	if (server->pid > 0)
		kill(server->pid, SIGKILL);
	server->pid = 0;
}

static int ask_for_fork(struct server *server)
{
	int ends[2], on = 1, error;

	if (server->fork >= 0)
		return 0;
	error = open_pair(ends);
	if (error)
		return error;
	AUTOCLOSE int theirs = ends[1];
	server->fork = ends[0];
	server->mark = process_mark();
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = CALLS_EVENT + (uint64_t)(server - servers)};
	/* The service may be stopped, or not listen: it must not hold us up. */
	fcntl(server->socket, F_SETFL, O_NONBLOCK);
	fcntl(server->fork, F_SETFL, O_NONBLOCK);
	if (setsockopt(server->fork, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) < 0 ||
	    epoll_ctl(epoll, EPOLL_CTL_ADD, server->fork, &event) < 0)
		error = -errno;
	if (!error)
		error = send_message(server->socket, &server->mark, sizeof server->mark, NULL, 0, &theirs, 1);
	if (error)
		drop_fork(server);
	return error;
}

/* The pid of who said that it is ready, by the kernel's word; 0 if nobody will, -1 if nobody has. */
static pid_t hear_fork(int fd)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(struct ucred))];
	} control;
	char word;
	struct iovec part = {&word, 1};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
	struct ucred who;

	/* Descriptors that come with it are not taken: there is no room for them. */
	ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (size != 1)
		return size < 0 && errno == EAGAIN ? -1 : 0;
	for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at))
		if (at->cmsg_level == SOL_SOCKET && at->cmsg_type == SCM_CREDENTIALS &&
		    at->cmsg_len == CMSG_LEN(sizeof who)) {
			memcpy(&who, CMSG_DATA(at), sizeof who);
			return who.pid;
		}
	return 0;
}

/* Whether it is ours to wait for, nobody else's, and can be found again by the mark that it has now. */
static bool take_fork(pid_t pid, uint64_t mark)
{
	siginfo_t state = {.si_pid = 0};

	return pid > 1 && !command_is(0, pid) && waitid(P_PID, (id_t)pid, &state, WEXITED | WNOHANG | WNOWAIT) == 0 &&
	       state.si_pid == 0 && process_set_mark(pid, mark) == 0;
}

/* --- Calls -------------------------------------------------------------------------------------------- */

static struct call *new_call(const struct server *server)
{
	struct call *call = malloc(sizeof *call);

	if (call)
		*call = (struct call){server->id, {-1, -1, -1, -1}, -1, 0};
	return call;
}

void call_free(struct call *call)
{
	for (unsigned i = 0; call && i < 4; i++)
		close_fd(&call->descriptors[i]);
	if (call)
		close_fd(&call->socket);
	free(call);
}

static void refuse_all(const struct server *server, int error)
{
	for (struct command *one; (one = command_waiting(server->id));)
		command_refuse(one, error);
}

static void count_failure(struct server *server)
{
	drop_fork(server);
	if (++server->failures >= TRIES) {
		server->failures = 0;
		refuse_all(server, EAGAIN);
	}
}

/* Gives the oldest call to the fork that is ready, and has the next fork made meanwhile. */
static void serve(struct server *server)
{
	struct command *command = command_waiting(server->id);
	char word = 0;

	if (!command)
		return;
	if (server->pid > 0) {
		if (send_message(server->fork, &word, 1, NULL, 0, command->call->descriptors, 4) < 0) {
			count_failure(server);
		} else {
			server->failures = 0;
			command->pid = server->pid;
			command->mark = server->mark;
			command->result.running = now();
			command->call->socket = server->fork;
			epoll_ctl(epoll, EPOLL_CTL_DEL, server->fork, NULL);
			server->fork = -1;
			server->pid = 0;
		}
	}
	int error = ask_for_fork(server);
	/* One that has hung up is of no use, if it has not ended already: whoever waits is told when it has. */
	if (error == -EPIPE || error == -ECONNRESET)
		kill(command_pid(server->id), SIGKILL);
	else if (error)
		refuse_all(server, error);
}

void calls_event(uint64_t index)
{
	struct server *server = index < SERVERS ? &servers[index] : NULL;

	/* The event may be one of a fork that was dropped, or given a call, in this same turn. */
	if (!server || !server->id || server->fork < 0)
		return;
	pid_t said = hear_fork(server->fork);
	if (said < 0)
		return;
	if (!server->pid && take_fork(said, server->mark))
		server->pid = said;
	else
		count_failure(server); /* it has ended, says too much, or is none */
	serve(server);
}

bool call_goes_on(struct command *command)
{
	struct call *call = command->call;
	char word;

	/* Before it begins, a fork says so; we look only now. One that was to end has done so. */
	if (!call || command->result.flags || recv(call->socket, &word, 1, MSG_DONTWAIT) == 1)
		return false;
	struct server *server = find(call->service);
	close_fd(&call->socket);
	command->pid = 0;
	if (!server || ++call->tries >= TRIES)
		command_refuse(command, server ? EAGAIN : ESRCH);
	else
		serve(server);
	return true;
}

void calls_reaped(pid_t pid)
{
	for (struct server *server = servers; server < servers + SERVERS; server++)
		if (server->id && server->pid == pid) {
			server->pid = 0; /* from now on it may be anybody's */
			drop_fork(server);
		}
}

void calls_service_ended(uint32_t id)
{
	struct server *server = find(id);

	if (!server)
		return;
	drop_fork(server);
	close_fd(&server->socket);
	for (struct command *one; (one = command_waiting(id));)
		command_refuse(one, ESRCH);
	server->id = 0;
}

int call_service(uint32_t id, char *payload, size_t size, int input)
{
	struct server *server = find(0);
	int ends[2], error = server && id ? open_pair(ends) : -EAGAIN;

	if (error)
		return error;
	AUTOCLOSE int theirs = ends[1];
	*server = (struct server){.id = id, .socket = ends[0], .fork = -1};
	error = command_service(id, payload, size, input, theirs);
	if (error || !command_is(id, 0)) { /* it could not be run, which was said */
		calls_service_ended(id);
		return error;
	}
	ask_for_fork(server); /* it hears that once it listens; what fails now is tried again with a call */
	return 0;
}

/* As a file: it may be longer than a message. */
static int written(const char *payload, size_t size)
{
	int fd = memfd_create("call", MFD_CLOEXEC);
	int error = fd < 0 ? -errno : write_all(fd, payload, size);

	if (!error && lseek(fd, 0, SEEK_SET) < 0)
		error = -errno;
	if (error)
		close_fd(&fd);
	return error ? error : fd;
}

int call_start(uint32_t id, char *payload, size_t size, int input)
{
	struct calling wanted;
	struct server *server;

	if (size < sizeof wanted)
		return -EPROTO;
	memcpy(&wanted, payload, sizeof wanted);
	payload += sizeof wanted;
	size -= sizeof wanted;
	server = wanted.service ? find(wanted.service) : NULL;
	if (!server)
		return -ESRCH;
	struct call *call = new_call(server);
	if (!call)
		return -ENOMEM;
	call->descriptors[0] = fcntl(input >= 0 ? input : command_null(), F_DUPFD_CLOEXEC, 0);
	call->descriptors[3] = written(payload, size);
	int error = call->descriptors[0] < 0 ? -errno : call->descriptors[3] < 0 ? call->descriptors[3] : 0;
	if (!error)
		error = command_call(id, payload, size, call);
	if (error) {
		call_free(call);
		return error;
	}
	serve(server);
	return 0;
}
