#define _GNU_SOURCE
#include "box.h"
#include "sys.h"

#include <sys/epoll.h>

void box_freezing_ends(struct box *box, int error)
{
	if (box->freezing < 0)
		return;
	close_fd(&box->freezing);
	if (error)
		refuse(box->freeze_serial, error, "freezer");
	else
		reply(box->freeze_serial, 0, box->number, NULL, 0, NULL, 0);
}

void box_freeze(const struct request *request)
{
	struct box *box = box_of(request->number);
	bool wanted = request->kind == REQUEST_FREEZE;
	int error = box && !box->ended ? 0 : -ESTALE;

	if (!error)
		box_freezing_ends(box, -ECANCELED);
	if (!error)
		error = cgroup_freeze(&box->slot->cgroup, wanted);
	if (!error)
		box->frozen = true;
	int events = error || !wanted ? -1 : cgroup_events(&box->slot->cgroup);
	if (!error && wanted && events < 0)
		error = events;
	if (error) {
		refuse(request->serial, error, "freezer");
		return;
	}
	if (!wanted) {
		reply(request->serial, 0, box->number, NULL, 0, NULL, 0);
		return;
	}
	box->freezing = events;
	box->freeze_serial = request->serial;
	struct epoll_event event = {.events = EPOLLPRI, .data.u64 = FREEZE_EVENT | box->number};
	epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, events, &event);
	if (cgroup_is_frozen(events))
		box_freezing_ends(box, 0);
}

void box_frozen(struct box *box)
{
	if (box->freezing >= 0 && cgroup_is_frozen(box->freezing))
		box_freezing_ends(box, 0);
}
