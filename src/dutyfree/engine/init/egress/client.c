#define _GNU_SOURCE
#include "egress/client.h"

#include "egress/netns.h"
#include "sys.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static int connected = -1;
static pid_t process;

int gate_open(int epoll, uint64_t event)
{
	struct epoll_event watched = {.events = EPOLLIN, .data.u64 = event};

	if (connected >= 0)
		return 0;
	int made = egress_start(&process);
	if (made < 0)
		return made;
	connected = made;
	if (epoll_ctl(epoll, EPOLL_CTL_ADD, connected, &watched) < 0) {
		int error = -errno;
		gate_close();
		return error;
	}
	return 0;
}

void gate_close(void)
{
	if (connected < 0)
		return;
	close_fd(&connected);
	kill(process, SIGKILL);
	waitpid(process, NULL, 0);
}

int gate_send(uint32_t kind, uint32_t number, uint32_t serial, const void *body, size_t size, const int *way)
{
	struct request head = {.kind = kind, .serial = serial, .number = number, .size = (uint32_t)size};

	if (connected < 0)
		return -EPIPE;
	return send_message(connected, &head, sizeof head, body, size, way, way ? WAY_FDS : 0);
}

bool gate_hear(struct reply *said)
{
	ssize_t size = recv(connected, said, sizeof *said, MSG_DONTWAIT);

	if (size == sizeof *said)
		return true;
	said->serial = 0;
	if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
		said->value = 0;
		return true;
	}
	gate_close();
	return false;
}
