#include "launcher/keep.h"

#include "launcher/host.h"
#include "launcher/layers.h"
#include "launcher/sandboxes.h"
#include "sys.h"

#include <limits.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static int listening = -1;

int keep_listen(int listener)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = KEEP_EVENT};
	uint32_t at = 0;
	int error = listening >= 0 || sandbox_next(&at) ? -EEXIST : 0;

	if (!error && epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, listener, &event) < 0)
		error = -errno;
	if (error) {
		close(listener);
		return error;
	}
	listening = listener;
	host.keeps = true;
	slot_kill_parked(); /* they could not get the socket of a new owner */
	return 0;
}

void keep_stop(const struct request *request)
{
	close_fd(&listening);
	host.keeps = false;
	reply(request->serial, 0, 0, NULL, 0, NULL, 0);
}

int keep_accept(void)
{
	int fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC);

	return fd < 0 ? -errno : fd;
}

void keep_set_lease(const struct request *request, uint64_t until)
{
	struct sandbox *sandbox = sandbox_find(request->number);

	if (sandbox && !sandbox->ended && host.keeps)
		sandbox->lease = until;
	reply(request->serial, sandbox && host.keeps ? 0 : -ESTALE, request->number, NULL, 0, NULL, 0);
}

void keep_adopt(const struct request *request)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	int pair[2];

	if (!sandbox || sandbox->ended || sandbox->owned || sandbox->lease <= now() || sandbox->slot->keeper < 0) {
		refuse(request->serial, -ESTALE, "there is no such sandbox without an owner");
		return;
	}
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0) {
		refuse(request->serial, -errno, "cannot create a socket");
		return;
	}
	int error = send_message_now(sandbox->slot->keeper, "", 1, pair[1]);
	close(pair[1]);
	if (error)
		refuse(request->serial, error, "cannot reach its first process");
	else {
		sandbox->owned = true;
		reply(request->serial, 0, sandbox->number, &sandbox->lease, sizeof sandbox->lease,
		      (int[]){pair[0], sandbox->slot->pidfd}, 2);
	}
	close(pair[0]);
}

static void kill_sandbox(struct sandbox *sandbox)
{
	sandbox->lease = 0; /* so that nobody adopts it while it ends */
	pidfd_signal(sandbox->slot->pidfd, SIGKILL);
}

void keep_sweep(const struct request *request, const uint32_t *layers, size_t count)
{
	uint32_t at = 0, ended = 0;

	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		if (!sandbox->owned) {
			kill_sandbox(sandbox);
			ended++;
		}
	if (!request->number) {
		slot_kill_parked(); /* their mount namespaces would keep the layers */
		layers_remove_others(layers, count);
	}
	reply(request->serial, 0, ended, NULL, 0, NULL, 0);
}

void keep_orphan(void)
{
	uint32_t at = 0;

	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		sandbox->owned = sandbox->destroying = false;
	slot_kill_parked();
	keep_end_expired(); /* a new owner may be here before the next lease ends */
}

bool keep_end_expired(void)
{
	uint32_t at = 0;
	uint64_t time = now();
	bool any = false;

	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));) {
		any = true;
		if (sandbox->lease <= time)
			kill_sandbox(sandbox);
	}
	return any;
}

int keep_wait_ms(void)
{
	uint32_t at = 0;
	uint64_t first = UINT64_MAX, time = now();

	/* One whose lease has ended was killed, and its end is an event. */
	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		if (sandbox->lease > time && sandbox->lease < first)
			first = sandbox->lease;
	if (first == UINT64_MAX)
		return -1;
	uint64_t wait = (first - time) / 1000000u + 1;
	return wait > INT_MAX ? INT_MAX : (int)wait;
}
