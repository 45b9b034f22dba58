#define _GNU_SOURCE
#include "launcher/sandboxes.h"
#include "egress/client.h"
#include "launcher/host.h"
#include "egress/netns.h"
#include "sys.h"

#include <signal.h>

/* What the sandbox may reach. The egress process answers for us, when nothing else is reached any more. */
void box_network(const struct request *request, const char *body)
{
	struct box *box = box_of(request->number);
	int way[WAY_FDS] = {-1, -1, -1}, error = !box || box->ended ? -ESRCH : box->asked ? -EBUSY : box->shared ? -EOPNOTSUPP : 0;
	bool open = !error && request->size > 0 && !box->networked;

	if (!error && !box->networked && !request->size) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	}
	/* It takes programs in the kernel, which are root's. */
	if (open)
		error = host.rootless ? -EOPNOTSUPP : gate_open(launcher_epoll, EGRESS_EVENT);
	if (open && !error) {
		box->opened = true;
		error = network_open(box->slot->network, way);
	}
	if (!error) {
		uint32_t kind = open ? EGRESS_OPEN : request->size ? EGRESS_CHANGE : EGRESS_CLOSE;
		error = gate_send(kind, box->number, request->serial, body, request->size, open ? way : NULL);
	}
	for (int i = 0; i < WAY_FDS; i++)
		close_fd(&way[i]);
	if (error) {
		refuse(request->serial, error, "network");
		return;
	}
	box->networked = true;
	box->opening = open;
	box->closing = request->size == 0;
	box->asked = request->serial;
}

void box_egress_said(void)
{
	struct reply said;

	if (gate_hear(&said)) {
		struct box *box = box_of(said.value);
		if (box && box->asked == said.serial) {
			/* Only now: those in there have to hear that they were cut off. */
			if ((box->closing || (box->opening && said.error)) && !box->ended) {
				network_close(box->slot->network);
				box->networked = false;
			}
			box->asked = 0;
			reply(said.serial, -said.error, said.value, "network", 7, NULL, 0);
		}
		return;
	}
	/* It is gone, and with it what the sandboxes rely on: they end, which their owner hears of. */
	uint32_t at = 0;
	for (struct box *box; (box = box_next(&at));)
		if (box->networked)
			pidfd_signal(box->slot->pidfd, SIGKILL);
}

void box_connect(const struct request *request, const struct port *port)
{
	struct box *box = box_of(request->number);
	int made = -ESRCH;

	if (box && !box->ended)
		made = network_connect(box->shared ? -1 : box->slot->network, port->port, port->ipv6);
	if (made < 0)
		refuse(request->serial, made, "connection");
	else
		reply(request->serial, 0, request->number, NULL, 0, &made, 1);
	close_fd(&made);
}
