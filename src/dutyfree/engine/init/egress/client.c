#define _GNU_SOURCE
#include "egress/client.h"

#include "egress/netns.h"
#include "sys.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int egress_socket = -1;
static pid_t egress_pid;

int egress_client_open(int epoll, uint64_t event)
{
	struct epoll_event watched = {.events = EPOLLIN, .data.u64 = event};

	if (egress_socket >= 0)
		return 0;
	int started = egress_start(&egress_pid);
	if (started < 0)
		return started;
	egress_socket = started;
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, egress_socket, &watched) < 0) {
		int error = -errno;
		egress_client_close();
		return error;
	}
	return 0;
}

void egress_client_close(void)
{
	if (egress_socket < 0)
		return;
	close_fd(&egress_socket);
	kill(egress_pid, SIGKILL);
	waitpid(egress_pid, NULL, 0);
}

int egress_client_send(uint32_t kind, uint32_t number, uint32_t serial, const void *body, size_t size, const int *fds)
{
	struct request head = {.kind = kind, .serial = serial, .number = number, .size = (uint32_t)size};

	if (egress_socket < 0)
		return -EPIPE;
	return send_message(egress_socket, &head, sizeof head, body, size, fds, fds ? EGRESS_FDS : 0);
}

bool egress_client_receive(struct reply *answer)
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
