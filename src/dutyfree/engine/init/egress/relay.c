/* TCP connections: forward data between the sandbox (inside) and the destination (outside), at the speed of the slower
 * side.
 *
 * splice() moves the data through a pipe that all connections share, so the pipe must be empty after each turn. What
 * the receiver cannot take is saved in memory, and nothing more is read until it is sent. */
#include "egress/egress.h"

#include "sys.h"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define ACCEPTS_PER_TURN 16     /* per turn of the sandbox */
#define CHUNK (128u << 10)      /* size of the pipe, and the most that is saved */
#define TURN_BYTES (512u << 10) /* in one direction, per turn */
#define ATTEMPTS 4              /* SYN packets: about half a minute */
#define FILES_KEPT 1024         /* descriptors for everything else */

enum { INSIDE, OUTSIDE };

struct connection {
	struct watch watch[2]; /* first members, so that a watch leads to its connection */
	struct connection *next, **link;
	bool connecting;
	bool ended[2]; /* this side has sent FIN, and the other side got it */
	struct pending {
		char *data;
		size_t begin, end;
	} pending[2]; /* data from this side that the other could not take yet */
};

static int pipe_fds[2];
static unsigned all_connections, connections_max;

static void reset(int fd)
{
	const struct linger at_once = {1, 0};

	setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
	close(fd);
}

static void connection_close(struct client *client, struct connection *connection, bool with_reset)
{
	for (int side = INSIDE; side <= OUTSIDE; side++) {
		watch_set(client, &connection->watch[side], 0);
		if (with_reset)
			reset(connection->watch[side].fd);
		else
			close(connection->watch[side].fd);
	}
	free(connection->pending[INSIDE].data);
	free(connection->pending[OUTSIDE].data);
	*connection->link = connection->next;
	if (connection->next)
		connection->next->link = connection->link;
	client->connection_count--;
	all_connections--;
	egress_free(connection);
}

void relay_close_all(struct client *client)
{
	while (client->connections)
		connection_close(client, client->connections, true);
}

/* Check the policy and connect to the destination. Returns a non-blocking socket, or -1. */
static int connect_outside(struct client *client, int inside)
{
	struct sockaddr_storage found, target;
	socklen_t size = sizeof found;
	struct in6_addr address = {.s6_addr = {[10] = 0xff, [11] = 0xff}};
	const int yes = 1, attempts = ATTEMPTS;
	uint16_t port;

	if (getsockname(inside, (struct sockaddr *)&found, &size) < 0)
		return -1;
	if (found.ss_family == AF_INET6) {
		address = ((struct sockaddr_in6 *)&found)->sin6_addr;
		port = ntohs(((struct sockaddr_in6 *)&found)->sin6_port);
	} else {
		memcpy(address.s6_addr + 12, &((struct sockaddr_in *)&found)->sin_addr, 4);
		port = ntohs(((struct sockaddr_in *)&found)->sin_port);
	}
	switch (policy_check(&client->policy, &address, port, now())) {
	case ALLOWED:
		if (is_host_address(&address))
			return -1;
		size = socket_address(&address, port, &target);
		break;
	case ALLOWED_HOST:
		memcpy(address.s6_addr + 12, (const uint8_t[]){127, 0, 0, 1}, 4);
		size = socket_address(&address, port, &target);
		break;
	case ALLOWED_RESOLVER:
		memcpy(&address, client->policy.head.resolver[0].address, sizeof address);
		size = socket_address(&address, client->policy.head.resolver[0].port, &target);
		break;
	default:
		return -1;
	}
	int outside = socket(target.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (outside < 0)
		return -1;
	setsockopt(outside, IPPROTO_TCP, TCP_SYNCNT, &attempts, sizeof attempts);
	setsockopt(outside, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
	setsockopt(outside, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
	setsockopt(inside, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
	setsockopt(inside, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
	/* Treat urgent data as normal data (read_urgent). The inside socket inherits this option from its listener. */
	setsockopt(outside, SOL_SOCKET, SO_OOBINLINE, &yes, sizeof yes);
	if (connect(outside, (struct sockaddr *)&target, size) < 0 && errno != EINPROGRESS)
		close_fd(&outside);
	return outside;
}

static void connection_open(struct client *client, int inside)
{
	struct sockaddr_storage peer;
	socklen_t size = sizeof peer;
	struct connection *connection = NULL;
	int outside = -1;

	if (!connections_max) {
		long files = sysconf(_SC_OPEN_MAX);
		connections_max = (unsigned)(files > 2 * FILES_KEPT ? files - FILES_KEPT : files / 2) / 2;
	}
	if (client->connection_count < CONNECTIONS_MAX && all_connections < connections_max)
		outside = connect_outside(client, inside);
	if (outside >= 0)
		connection = calloc(1, sizeof *connection);
	if (!connection) {
		close_fd(&outside);
		reset(inside);
		return;
	}
	connection->watch[INSIDE] = (struct watch){.kind = WATCH_INSIDE, .fd = inside};
	connection->watch[OUTSIDE] = (struct watch){.kind = WATCH_OUTSIDE, .fd = outside};
	connection->connecting = true;
	connection->next = client->connections;
	connection->link = &client->connections;
	if (connection->next)
		connection->next->link = &connection->next;
	client->connections = connection;
	client->connection_count++;
	all_connections++;
	watch_set(client, &connection->watch[OUTSIDE], EPOLLOUT);
	/* A connection on this machine is established already, and the client may have sent data. */
	if (getpeername(outside, (struct sockaddr *)&peer, &size) == 0)
		relay_event(client, &connection->watch[OUTSIDE], EPOLLOUT);
}

void relay_accept(struct client *client)
{
	for (int i = 0; i < ACCEPTS_PER_TURN; i++) {
		int inside = accept4(client->listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (inside < 0 && errno == ECONNABORTED)
			continue;
		if (inside < 0) {
			if (errno != EAGAIN && errno != EINTR)
				listener_pause(client);
			return;
		}
		connection_open(client, inside);
	}
}

enum progress { SOURCE_EMPTY, SINK_FULL, BROKEN };

/* Send saved data first. */
static enum progress send_pending(struct pending *pending, int sink)
{
	while (pending->begin < pending->end) {
		ssize_t sent = send(sink, pending->data + pending->begin, pending->end - pending->begin, MSG_NOSIGNAL);
		if (sent < 0)
			return errno == EAGAIN || errno == EINTR ? SINK_FULL : BROKEN;
		pending->begin += (size_t)sent;
	}
	free(pending->data);
	pending->data = NULL;
	return SOURCE_EMPTY;
}

/* Empty the shared pipe into memory. */
static enum progress save_pending(struct pending *pending, size_t left)
{
	static char dropped[CHUNK];
	char *data = malloc(left);

	for (pending->begin = pending->end = 0; pending->end < left;) {
		ssize_t count = read(pipe_fds[0], data ? data + pending->end : dropped, left - pending->end);
		if (count <= 0)
			abort(); /* splice() has put it there */
		pending->end += (size_t)count;
	}
	pending->data = data;
	return data ? SINK_FULL : BROKEN;
}

/* At urgent data splice() stops, as if the stream had ended. recv() gets past it. Returns what recv() returns. */
static ssize_t read_urgent(struct pending *pending, int source)
{
	static char data[CHUNK];
	ssize_t count = recv(source, data, sizeof data, 0);

	if (count <= 0)
		return count;
	pending->data = malloc((size_t)count);
	if (!pending->data)
		return -1;
	memcpy(pending->data, data, (size_t)count);
	pending->begin = 0;
	pending->end = (size_t)count;
	return count;
}

/* Acknowledge what was read at once. The kernel delays the acknowledgement by 40 ms where it expects an answer to send it
 * with. A sender that waits for it before it sends its next small packet (Nagle's algorithm) would wait that long. The
 * option does not last, so it is set again after each read. */
static void acknowledge(int source)
{
	const int yes = 1;

	setsockopt(source, IPPROTO_TCP, TCP_QUICKACK, &yes, sizeof yes);
}

/* Forward from one side to the other until one of them blocks. `readable`: epoll reported data. */
static enum progress forward(struct connection *connection, int from, bool readable)
{
	const unsigned how = SPLICE_F_MOVE | SPLICE_F_NONBLOCK;
	int source = connection->watch[from].fd, sink = connection->watch[!from].fd;
	struct pending *pending = &connection->pending[from];
	enum progress progress = pending->data ? send_pending(pending, sink) : SOURCE_EMPTY;

	for (size_t forwarded = 0; progress == SOURCE_EMPTY && forwarded < TURN_BYTES;) {
		ssize_t left = splice(source, NULL, pipe_fds[1], NULL, CHUNK, how);
		if (left == 0 || (left < 0 && errno == EAGAIN && readable && forwarded == 0)) {
			left = read_urgent(pending, source);
			if (left > 0) {
				forwarded += (size_t)left;
				progress = send_pending(pending, sink);
				continue;
			}
		}
		if (left < 0) {
			bool broken = errno != EAGAIN && errno != EINTR;
			if (!broken && forwarded > 0)
				acknowledge(source);
			return broken ? BROKEN : SOURCE_EMPTY;
		}
		if (left == 0) {
			connection->ended[from] = true;
			shutdown(sink, SHUT_WR);
			return SOURCE_EMPTY;
		}
		forwarded += (size_t)left;
		while (left > 0) {
			ssize_t sent = splice(pipe_fds[0], NULL, sink, NULL, (size_t)left, how);
			if (sent <= 0)
				break;
			left -= sent;
		}
		/* If the receiver is gone, sending the saved data will fail. */
		if (left > 0)
			progress = save_pending(pending, (size_t)left);
	}
	return progress;
}

int relay_prepare(void)
{
	return pipe2(pipe_fds, O_NONBLOCK | O_CLOEXEC) < 0 || fcntl(pipe_fds[0], F_SETPIPE_SZ, CHUNK) < 0 ? -errno : 0;
}

static bool failed(int fd)
{
	int error = 0;
	socklen_t size = sizeof error;

	return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) < 0 || error;
}

void relay_event(struct client *client, struct watch *watch, uint32_t events)
{
	struct connection *connection = (struct connection *)(void *)(watch - (watch->kind == WATCH_OUTSIDE));
	uint32_t interest[2] = {0, 0};

	if ((events & EPOLLERR || connection->connecting) && failed(watch->fd)) {
		connection_close(client, connection, true);
		return;
	}
	connection->connecting = false;
	for (int from = INSIDE; from <= OUTSIDE; from++) {
		if (connection->ended[from])
			continue;
		enum progress progress = forward(connection, from, events & EPOLLIN && watch == &connection->watch[from]);
		if (progress == BROKEN) {
			connection_close(client, connection, true);
			return;
		}
		if (progress == SINK_FULL)
			interest[!from] |= EPOLLOUT;
		else if (!connection->ended[from])
			interest[from] |= EPOLLIN;
	}
	if (connection->ended[INSIDE] && connection->ended[OUTSIDE]) {
		connection_close(client, connection, false);
		return;
	}
	watch_set(client, &connection->watch[INSIDE], interest[INSIDE]);
	watch_set(client, &connection->watch[OUTSIDE], interest[OUTSIDE]);
}
