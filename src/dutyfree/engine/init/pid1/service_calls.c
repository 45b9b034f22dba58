/* Calls: commands that run in a fork of a service, such as an interpreter with modules loaded.
 *
 * The service has a socket to init. Init asks for one fork in advance, with its own socket. The service forks twice, so
 * that init becomes the parent, and the fork calls setsid() and reports. Init trusts only the kernel: SCM_CREDENTIALS
 * says who sent the report, and waitid() that it is our child. Init then marks it. From now on it is like any command:
 * it gets its streams and its request, is killed by its mark, and reaped by init. */
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

#define SERVICES_MAX 16
#define TRIES_MAX 3 /* attempts per call, and failed forks in a row */

struct service {
	uint32_t id; /* id of its command; 0 for an unused entry */
	int socket;
	int fork;          /* socket of the fork in preparation, or -1 */
	pid_t pid;         /* of the fork once it is ready, else 0 */
	uint64_t mark;     /* the mark that it has or will get */
	unsigned failures; /* failed forks in a row */
};

static struct service services[SERVICES_MAX];
static int epoll;

void call_open(int fd)
{
	epoll = fd;
}

static struct service *find(uint32_t id)
{
	for (struct service *service = services; service < services + SERVICES_MAX; service++)
		if (service->id == id)
			return service;
	return NULL;
}

static int open_pair(int ends[2])
{
	return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0 ? -errno : 0;
}

/* --- Forks in advance ---------------------------------------------------------------------------- */

/* It has no call yet, so kill it. */
static void drop_fork(struct service *service)
{
	close_fd(&service->fork);
	if (service->pid > 0)
		kill(service->pid, SIGKILL);
	service->pid = 0;
}

static int request_fork(struct service *service)
{
	int ends[2], on = 1, error;

	if (service->fork >= 0)
		return 0;
	error = open_pair(ends);
	if (error)
		return error;
	AUTOCLOSE int theirs = ends[1];
	service->fork = ends[0];
	service->mark = process_mark();
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = EVENT_CALLS + (uint64_t)(service - services)};
	/* Non-blocking: a service that is stopped or does not read must not block init. */
	fcntl(service->socket, F_SETFL, O_NONBLOCK);
	fcntl(service->fork, F_SETFL, O_NONBLOCK);
	if (setsockopt(service->fork, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) < 0 ||
	    epoll_ctl(epoll, EPOLL_CTL_ADD, service->fork, &event) < 0)
		error = -errno;
	if (!error)
		error = send_message(service->socket, &service->mark, sizeof service->mark, NULL, 0, &theirs, 1);
	if (error)
		drop_fork(service);
	return error;
}

/* Receive a fork's report. Returns the sender's pid from the kernel, 0 if it is invalid or the socket is closed, -1 if
 * there is none yet. */
static pid_t receive_fork_pid(int fd)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(struct ucred))];
	} control;
	char byte;
	struct iovec part = {&byte, 1};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
	struct ucred credentials;

	/* No room for SCM_RIGHTS, so the kernel drops descriptors that come along. */
	ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (size != 1)
		return size < 0 && errno == EAGAIN ? -1 : 0;
	for (struct cmsghdr *at = CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at))
		if (at->cmsg_level == SOL_SOCKET && at->cmsg_type == SCM_CREDENTIALS &&
		    at->cmsg_len == CMSG_LEN(sizeof credentials)) {
			memcpy(&credentials, CMSG_DATA(at), sizeof credentials);
			return credentials.pid;
		}
	return 0;
}

/* Whether it is our own live child and not yet a command. Marks it. */
static bool adopt_fork(pid_t pid, uint64_t mark)
{
	siginfo_t state = {.si_pid = 0};

	return pid > 1 && !command_exists(0, pid) && waitid(P_PID, (id_t)pid, &state, WEXITED | WNOHANG | WNOWAIT) == 0 &&
	       state.si_pid == 0 && process_set_mark(pid, mark) == 0;
}

/* --- Calls --------------------------------------------------------------------------------------- */

static struct call *new_call(const struct service *service)
{
	struct call *call = malloc(sizeof *call);

	if (call)
		*call = (struct call){service->id, {-1, -1, -1, -1}, -1, 0};
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

static void fail_calls(const struct service *service, int error)
{
	for (struct command *one; (one = command_oldest_call(service->id));)
		command_fail(one, error);
}

static void count_failure(struct service *service)
{
	drop_fork(service);
	if (++service->failures >= TRIES_MAX) {
		service->failures = 0;
		fail_calls(service, EAGAIN);
	}
}

/* Give the oldest call to the ready fork, and ask for the next fork. */
static void assign_call(struct service *service)
{
	struct command *command = command_oldest_call(service->id);
	char byte = 0;

	if (!command)
		return;
	if (service->pid > 0) {
		if (send_message(service->fork, &byte, 1, NULL, 0, command->call->descriptors, 4) < 0) {
			count_failure(service);
		} else {
			service->failures = 0;
			command->pid = service->pid;
			command->mark = service->mark;
			command->result.running = now();
			command->call->socket = service->fork;
			epoll_ctl(epoll, EPOLL_CTL_DEL, service->fork, NULL);
			service->fork = -1;
			service->pid = 0;
		}
	}
	int error = request_fork(service);
	/* The service has closed its socket. Kill it; the calls fail when it is reaped. */
	if (error == -EPIPE || error == -ECONNRESET)
		kill(command_pid(service->id), SIGKILL);
	else if (error)
		fail_calls(service, error);
}

void call_event(uint64_t index)
{
	struct service *service = index < SERVICES_MAX ? &services[index] : NULL;

	/* The fork may have been dropped or used in this same turn. */
	if (!service || !service->id || service->fork < 0)
		return;
	pid_t pid = receive_fork_pid(service->fork);
	if (pid < 0)
		return;
	if (!service->pid && adopt_fork(pid, service->mark))
		service->pid = pid;
	else
		count_failure(service); /* it has ended, or sent something else */
	assign_call(service);
}

bool call_retry(struct command *command)
{
	struct call *call = command->call;
	char byte;

	/* A fork sends one byte before it begins; read it only now. After a kill or a timeout there is no retry. */
	if (!call || command->result.flags || recv(call->socket, &byte, 1, MSG_DONTWAIT) == 1)
		return false;
	struct service *service = find(call->service);
	close_fd(&call->socket);
	command->pid = 0;
	if (!service || ++call->tries >= TRIES_MAX)
		command_fail(command, service ? EAGAIN : ESRCH);
	else
		assign_call(service);
	return true;
}

void call_reaped(pid_t pid)
{
	for (struct service *service = services; service < services + SERVICES_MAX; service++)
		if (service->id && service->pid == pid) {
			service->pid = 0; /* the pid may be reused from now on */
			drop_fork(service);
		}
}

void call_service_ended(uint32_t id)
{
	struct service *service = find(id);

	if (!service)
		return;
	drop_fork(service);
	close_fd(&service->socket);
	for (struct command *one; (one = command_oldest_call(id));)
		command_fail(one, ESRCH);
	service->id = 0;
}

int service_start(uint32_t id, char *payload, size_t size, int input)
{
	struct service *service = find(0);
	int ends[2], error = service && id ? open_pair(ends) : -EAGAIN;

	if (error)
		return error;
	AUTOCLOSE int theirs = ends[1];
	*service = (struct service){.id = id, .socket = ends[0], .fork = -1};
	error = command_service(id, payload, size, input, theirs);
	if (error || !command_exists(id, 0)) { /* the program could not be started; that was reported */
		call_service_ended(id);
		return error;
	}
	request_fork(service); /* the service reads it when it is ready; if this fails, the next call tries again */
	return 0;
}

/* In a file, because it may be larger than a message. */
static int memfd_with(const char *payload, size_t size)
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
	struct call_request request;
	struct service *service;

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	payload += sizeof request;
	size -= sizeof request;
	service = request.service ? find(request.service) : NULL;
	if (!service)
		return -ESRCH;
	struct call *call = new_call(service);
	if (!call)
		return -ENOMEM;
	call->descriptors[0] = fcntl(input >= 0 ? input : command_null_fd(), F_DUPFD_CLOEXEC, 0);
	call->descriptors[3] = memfd_with(payload, size);
	int error = call->descriptors[0] < 0 ? -errno : call->descriptors[3] < 0 ? call->descriptors[3] : 0;
	if (!error)
		error = command_call(id, payload, size, call);
	if (error) {
		call_free(call);
		return error;
	}
	assign_call(service);
	return 0;
}
