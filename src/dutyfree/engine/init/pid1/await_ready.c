/* Wait until a file exists, or a Unix socket accepts connections. It polls in a worker process that is killed at the
 * deadline, because no event tells when a socket starts to listen. */
#include "pid1/init.h"
#include "sys.h"

#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define POLL_MIN_NS 500000L /* nanoseconds between polls: first, and at most */
#define POLL_MAX_NS 50000000L

static bool file_exists(const char *path)
{
	struct stat found;

	return stat(path, &found) == 0;
}

static bool accepts_connections(const char *path)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	AUTOCLOSE int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	memcpy(address.sun_path, path, strlen(path) + 1);
	/* EAGAIN: the backlog is full. EPROTOTYPE: not a stream socket. Someone listens in both cases. */
	return fd >= 0 && (connect(fd, (struct sockaddr *)&address, sizeof address) == 0 || errno == EAGAIN ||
			   errno == EPROTOTYPE);
}

static int wait_for(const char *path, bool (*is_ready)(const char *path))
{
	struct timespec pause = {.tv_nsec = POLL_MIN_NS};

	while (!is_ready(path)) {
		nanosleep(&pause, NULL);
		if (pause.tv_nsec < POLL_MAX_NS)
			pause.tv_nsec += pause.tv_nsec / 4;
	}
	return 0;
}

static int wait_for_file(const char *path, int unused)
{
	(void)unused;
	return wait_for(path, file_exists);
}

static int wait_for_socket(const char *path, int unused)
{
	(void)unused;
	return wait_for(path, accepts_connections);
}

int await_start(uint32_t id, char *payload, size_t size)
{
	struct await_request request;
	const char *path = payload + sizeof request;

	if (size <= sizeof request || payload[size - 1] != 0 || strlen(path) != size - sizeof request - 1)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	if (request.kind == AWAIT_SOCKET && strlen(path) >= sizeof((struct sockaddr_un *)0)->sun_path)
		return -ENAMETOOLONG;
	if (request.kind != AWAIT_FILE && request.kind != AWAIT_SOCKET)
		return -EPROTO;
	return command_worker(id, request.kind == AWAIT_FILE ? wait_for_file : wait_for_socket, path, -1);
}
