#define _GNU_SOURCE
#include "launcher/sandboxes.h"
#include "egress/client.h"
#include "launcher/host.h"
#include "egress/netns.h"
#include "sys.h"

#include <signal.h>

/* What the sandbox may reach. The egress process answers for us, when nothing else is reached any more. */
void sandbox_network(const struct request *request, const char *body)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	int fds[EGRESS_FDS] = {-1, -1, -1}, error = !sandbox || sandbox->ended ? -ESRCH : sandbox->network_serial ? -EBUSY : sandbox->shared_network ? -EOPNOTSUPP : 0;
	bool open = !error && request->size > 0 && !sandbox->has_egress;

	if (!error && !sandbox->has_egress && !request->size) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	}
	/* It takes programs in the kernel, which are root's. */
	if (open)
		error = host.rootless ? -EOPNOTSUPP : egress_client_open(launcher_epoll, EGRESS_EVENT);
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
		refuse(request->serial, error, "network");
		return;
	}
	sandbox->has_egress = true;
	sandbox->egress_opening = open;
	sandbox->egress_closing = request->size == 0;
	sandbox->network_serial = request->serial;
}

void egress_replied(void)
{
	struct reply answer;

	if (egress_client_receive(&answer)) {
		struct sandbox *sandbox = sandbox_find(answer.value);
		if (sandbox && sandbox->network_serial == answer.serial) {
			/* Only now: those in there have to hear that they were cut off. */
			if ((sandbox->egress_closing || (sandbox->egress_opening && answer.error)) && !sandbox->ended) {
				netns_close(sandbox->slot->netns);
				sandbox->has_egress = false;
			}
			sandbox->network_serial = 0;
			reply(answer.serial, -answer.error, answer.value, "network", 7, NULL, 0);
		}
		return;
	}
	/* It is gone, and with it what the sandboxes rely on: they end, which their owner hears of. */
	uint32_t at = 0;
	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		if (sandbox->has_egress)
			pidfd_signal(sandbox->slot->pidfd, SIGKILL);
}

void sandbox_connect(const struct request *request, const struct port *port)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	int made = -ESRCH;

	if (sandbox && !sandbox->ended)
		made = netns_connect(sandbox->shared_network ? -1 : sandbox->slot->netns, port->port, port->ipv6);
	if (made < 0)
		refuse(request->serial, made, "connection");
	else
		reply(request->serial, 0, request->number, NULL, 0, &made, 1);
	close_fd(&made);
}
