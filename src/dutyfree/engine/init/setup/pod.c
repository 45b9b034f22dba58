/* Init in a pod of Kubernetes: two processes.
 *
 * The stream is that of an exec, which can begin only when the container runs. PID 1 waits for it on a socket. The exec
 * sends its stdin and stdout there, so that no process stands between the stream and PID 1. Then the exec waits for the
 * end of PID 1, because a runtime may close the streams of an exec that has ended.
 *
 * The socket is abstract, so that a read-only file system is enough. It belongs to the network namespace of the pod, so
 * PID 1 accepts only processes of its own pid namespace. No command has run before the first one, and none is accepted
 * after it. */
#include "setup/pod.h"

#include "setup/guest.h"
#include "sys.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define FAILED 70
#define STREAMS 2
#define JOIN_NS 30000000000u /* how long PID 1 may take to listen */
#define RETRY_NS 2000000
#define HELD 100

static const struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "\0dutyfree-init"};
static const socklen_t address_size = offsetof(struct sockaddr_un, sun_path) + sizeof "\0dutyfree-init" - 1;

static int fail(const char *what)
{
	fprintf(stderr, "dutyfree-init: %s: %s\n", what, strerror(errno));
	return FAILED;
}

static void end(int number)
{
	(void)number;
	_exit(0);
}

static bool is_own(int connection)
{
	struct ucred peer;
	socklen_t size = sizeof peer;

	/* A process of another pid namespace has the number 0. */
	return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid > 0 &&
	       peer.uid == geteuid();
}

/* The streams of the first process that joins. The connection stays open, at a number that init does not use: its end
 * tells that process of ours. */
static int accept_streams(int listener, int *streams)
{
	for (;;) {
		char byte;
		size_t count = 0;
		int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (connection < 0 && errno != EINTR && errno != ECONNABORTED)
			return -errno;
		if (connection < 0)
			continue;
		if (is_own(connection) &&
		    receive_message(connection, &byte, sizeof byte, 0, streams, STREAMS, &count) == sizeof byte &&
		    count == STREAMS) {
			int held = fcntl(connection, F_DUPFD_CLOEXEC, HELD);
			close(connection);
			return held < 0 ? -errno : 0;
		}
		while (count > 0)
			close(streams[--count]);
		close(connection);
	}
}

int pod_run(void)
{
	int streams[STREAMS];

	if (getpid() != 1) {
		fputs("dutyfree-init: pod must be PID 1 of a container\n", stderr);
		return 64;
	}
	/* Without a handler PID 1 gets no signal, and the deletion of the pod would wait. */
	signal(SIGTERM, end);
	AUTOCLOSE int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (listener < 0 || bind(listener, (const struct sockaddr *)&address, address_size) < 0 ||
	    listen(listener, 1) < 0)
		return fail("cannot listen");
	errno = -accept_streams(listener, streams);
	if (errno)
		return fail("cannot accept the streams");
	close_fd(&listener);
	if (dup2(streams[0], 0) < 0 || dup2(streams[1], 1) < 0)
		return fail("cannot use the streams");
	for (int i = 0; i < STREAMS; i++)
		close(streams[i]);
	return guest_run(false);
}

int pod_join(void)
{
	const struct timespec pause = {.tv_nsec = RETRY_NS};
	const int streams[STREAMS] = {0, 1};
	const uint64_t deadline = now() + JOIN_NS;
	char byte = 0;

	AUTOCLOSE int connection = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connection < 0)
		return fail("cannot make a socket");
	/* An exec may come before PID 1 listens. Nothing tells when it does. */
	while (connect(connection, (const struct sockaddr *)&address, address_size) < 0) {
		if (errno != ECONNREFUSED || now() > deadline)
			return fail("PID 1 does not take the stream");
		nanosleep(&pause, NULL);
	}
	/* Commands must not trace this process, or open its streams. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0)
		return fail("cannot clear the dumpable flag");
	errno = -send_message(connection, &byte, sizeof byte, NULL, 0, streams, STREAMS);
	if (errno)
		return fail("cannot send the streams");
	close(0);
	close(1);
	while (read(connection, &byte, sizeof byte) < 0 && errno == EINTR)
		;
	return 0;
}
