#include "egress/client.h"

#include "egress/egress.h"
#include "egress/netns.h"
#include "launcher/host.h"
#include "sys.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int egress_socket = -1;
static pid_t egress_pid;
static const char cannot_set[] = "cannot set its network policy";

void egress_client_close(void)
{
	if (egress_socket < 0)
		return;
	close_fd(&egress_socket);
	kill(egress_pid, SIGKILL);
	waitpid(egress_pid, NULL, 0);
}

static int egress_client_open(void)
{
	struct epoll_event watched = {.events = EPOLLIN, .data.u64 = EGRESS_EVENT};

	if (egress_socket >= 0)
		return 0;
	int started = egress_start(&egress_pid);
	if (started < 0)
		return started;
	egress_socket = started;
	if (epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, egress_socket, &watched) < 0) {
		int error = -errno;
		egress_client_close();
		return error;
	}
	return 0;
}

static int egress_client_send(uint32_t kind, uint32_t number, uint32_t serial, const void *body, size_t size,
			      const int *fds)
{
	struct request head = {.kind = kind, .serial = serial, .number = number, .size = (uint32_t)size};

	if (egress_socket < 0)
		return -EPIPE;
	return send_message(egress_socket, &head, sizeof head, body, size, fds, fds ? EGRESS_FDS : 0);
}

static bool egress_client_receive(struct reply *answer)
{
	ssize_t size = recv(egress_socket, answer, sizeof *answer, MSG_DONTWAIT);

	if (size == sizeof *answer)
		return true;
	answer->serial = 0;
	if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
		answer->value = 0;
		return true;
	}
	egress_client_close();
	return false;
}

/* Open, change or close the network of a sandbox. The reply comes when the egress process has done it. */
void sandbox_network(const struct request *request, const char *body)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	int fds[EGRESS_FDS] = {-1, -1, -1};
	int error = !sandbox || sandbox->ended ? -ESRCH
		    : sandbox->network_serial  ? -EBUSY
		    : sandbox->shared_network  ? -EOPNOTSUPP
					       : 0;
	bool open = !error && request->size > 0 && !sandbox->has_egress;

	if (!error && !sandbox->has_egress && !request->size) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	}
	/* The sk_lookup program needs root. */
	if (open)
		error = host.rootless ? -EOPNOTSUPP : egress_client_open();
	if (open && !error) {
		sandbox->had_egress = true;
		error = netns_open(sandbox->slot->netns, fds);
	}
	if (!error) {
		uint32_t kind = open ? EGRESS_OPEN : request->size ? EGRESS_UPDATE : EGRESS_CLOSE;
		error = egress_client_send(kind, sandbox->number, request->serial, body, request->size, open ? fds : NULL);
	}
	for (int i = 0; i < EGRESS_FDS; i++)
		close_fd(&fds[i]);
	if (error) {
		refuse(request->serial, error, cannot_set);
		return;
	}
	sandbox->has_egress = true;
	sandbox->egress_opening = open;
	sandbox->egress_closing = request->size == 0;
	sandbox->network_serial = request->serial;
}

void sandbox_close_egress(const struct sandbox *sandbox)
{
	egress_client_send(EGRESS_CLOSE, sandbox->number, 0, NULL, 0, NULL);
}

void egress_replied(void)
{
	struct reply answer;

	if (egress_client_receive(&answer)) {
		struct sandbox *sandbox = sandbox_find(answer.value);
		if (sandbox && sandbox->network_serial == answer.serial) {
			/* Only now: the processes inside must first see that their connections are reset. */
			if ((sandbox->egress_closing || (sandbox->egress_opening && answer.error)) && !sandbox->ended) {
				netns_close(sandbox->slot->netns);
				sandbox->has_egress = false;
			}
			sandbox->network_serial = 0;
			reply(answer.serial, -answer.error, answer.value, cannot_set, sizeof cannot_set - 1, NULL, 0);
		}
		return;
	}
	/* The egress process is gone. Kill the sandboxes that use it; their owner sees them end. */
	uint32_t at = 0;
	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		if (sandbox->has_egress)
			pidfd_signal(sandbox->slot->pidfd, SIGKILL);
}

void sandbox_connect(const struct request *request, const struct port *port)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	int connection = -ESRCH;

	if (sandbox && !sandbox->ended)
		connection = netns_connect(sandbox->shared_network ? -1 : sandbox->slot->netns, port->port, port->ipv6);
	if (connection < 0)
		refuse(request->serial, connection, "cannot connect");
	else
		reply(request->serial, 0, request->number, NULL, 0, &connection, 1);
	close_fd(&connection);
}
