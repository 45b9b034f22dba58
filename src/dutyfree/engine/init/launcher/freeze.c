#define _GNU_SOURCE
#include "launcher/sandboxes.h"
#include "sys.h"

#include <signal.h>
#include <sys/epoll.h>

/* The kernel tells of changes to a group once in 10 ms at most. Of one that was thawed a moment ago we would hear
 * so much later: for as long, we look. */
#define LOOKING 20000000u /* nanoseconds */

static unsigned awaited; /* that are to stand still */
static uint64_t asked;   /* for the last of them */

bool box_freezing(void)
{
	return awaited && now() - asked < LOOKING;
}

void box_freezing_look(void)
{
	uint32_t at = 0;

	for (struct box *box; awaited && (box = box_next(&at));)
		box_frozen(box);
}

void box_freezing_ends(struct box *box, int error)
{
	if (box->freezing < 0)
		return;
	close_fd(&box->freezing);
	awaited--;
	if (error)
		refuse(box->freeze_serial, error, "freezer");
	else
		reply(box->freeze_serial, 0, box->number, NULL, 0, NULL, 0);
}

/* On version 2, and where nothing can be frozen, init is in no group of its sandbox. Awake it would end, during
 * the pause, what has its time then. It stops last: a process that waits for its answer to a system call cannot be
 * frozen. */
static int stop_init(const struct box *box)
{
	return cgroup_freezes_init() ? 0 : pidfd_signal(box->slot->pidfd, SIGSTOP);
}

static int freeze(const struct box *box)
{
	return cgroup_freezes() ? cgroup_freeze(&box->slot->cgroup, true) : stop_init(box);
}

static int thaw(const struct box *box)
{
	int error = cgroup_freezes() ? cgroup_freeze(&box->slot->cgroup, false) : 0;

	return !error && !cgroup_freezes_init() ? pidfd_signal(box->slot->pidfd, SIGCONT) : error;
}

/* Answered when all stand still. */
static int await_frozen(struct box *box, uint32_t serial)
{
	int events = cgroup_events(&box->slot->cgroup);

	if (events < 0)
		return events;
	box->freezing = events;
	box->freeze_serial = serial;
	awaited++;
	asked = now();
	struct epoll_event event = {.events = EPOLLPRI, .data.u64 = FREEZE_EVENT | box->number};
	epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, events, &event);
	box_frozen(box);
	return 0;
}

void box_freeze(const struct request *request)
{
	struct box *box = box_of(request->number);
	bool wanted = request->kind == REQUEST_FREEZE, waits = wanted && cgroup_freezes();
	int error = box && !box->ended ? 0 : -ESTALE;

	if (!error) {
		box_freezing_ends(box, -ECANCELED);
		error = wanted ? freeze(box) : thaw(box);
	}
	if (!error && waits) {
		box->frozen = true;
		error = await_frozen(box, request->serial);
	}
	if (error)
		refuse(request->serial, error, "freezer");
	else if (!waits)
		reply(request->serial, 0, box->number, NULL, 0, NULL, 0);
}

void box_frozen(struct box *box)
{
	if (box->freezing >= 0 && cgroup_is_frozen(box->freezing))
		box_freezing_ends(box, stop_init(box));
}
