#include "launcher/sandboxes.h"
#include "sys.h"

#include <signal.h>
#include <sys/epoll.h>

/* The kernel reports changes of cgroup.events at most every 10 ms. After a recent thaw the report would come late, so
 * poll for this long. */
#define POLL_NS 20000000u /* nanoseconds */

/* Where init is in the frozen group, the kernel may freeze it before a process that waits for the seccomp broker's
 * answer, and that process cannot be frozen. After FROZEN_NS, thaw for THAWED_NS, so that init can answer, and freeze
 * again, until all are frozen. */
#define FROZEN_NS 100000000u
#define THAWED_NS 10000000u

static unsigned pending;      /* sandboxes that a FREEZE waits for */
static uint64_t last_request; /* time of the latest FREEZE */
static uint64_t last_attempt; /* time of the latest freeze or thaw */
static bool thawed;           /* until the next attempt */

int freeze_wait_ms(void)
{
	if (!pending)
		return -1;
	if (now() - last_request < POLL_NS)
		return 1;
	return cgroup_freezer_has_init() ? (int)(thawed ? THAWED_NS : FROZEN_NS) / 1000000 : -1;
}

void freeze_poll(void)
{
	uint32_t at = 0;
	bool retry = pending && cgroup_freezer_has_init() && now() - last_attempt >= (thawed ? THAWED_NS : FROZEN_NS);

	if (retry) {
		thawed = !thawed;
		last_attempt = now();
	}
	for (struct sandbox *sandbox; pending && (sandbox = sandbox_next(&at));) {
		freeze_check(sandbox);
		if (retry && sandbox->freeze_events >= 0)
			cgroup_freeze(&sandbox->slot->cgroup, !thawed);
	}
}

void freeze_finish(struct sandbox *sandbox, int error)
{
	if (sandbox->freeze_events < 0)
		return;
	close_fd(&sandbox->freeze_events);
	pending--;
	if (error)
		refuse(sandbox->freeze_serial, error, "cannot freeze the sandbox");
	else
		reply(sandbox->freeze_serial, 0, sandbox->number, NULL, 0, NULL, 0);
}

/* On cgroup v2, and without a freezer, init is not in the frozen group, so it gets SIGSTOP: awake, it would kill
 * commands whose deadline passes during the pause. It stops last, because a process that waits for the seccomp broker's
 * answer cannot be frozen. */
static int stop_init(const struct sandbox *sandbox)
{
	return cgroup_freezer_has_init() ? 0 : pidfd_signal(sandbox->slot->pidfd, SIGSTOP);
}

static int freeze(const struct sandbox *sandbox)
{
	return cgroup_can_freeze() ? cgroup_freeze(&sandbox->slot->cgroup, true) : stop_init(sandbox);
}

static int thaw(const struct sandbox *sandbox)
{
	int error = cgroup_can_freeze() ? cgroup_freeze(&sandbox->slot->cgroup, false) : 0;

	return !error && !cgroup_freezer_has_init() ? pidfd_signal(sandbox->slot->pidfd, SIGCONT) : error;
}

/* The reply comes when all processes are frozen. */
static int await_frozen(struct sandbox *sandbox, uint32_t serial)
{
	int events = cgroup_open_events(&sandbox->slot->cgroup);

	if (events < 0)
		return events;
	sandbox->freeze_events = events;
	sandbox->freeze_serial = serial;
	pending++;
	last_request = last_attempt = now();
	thawed = false;
	struct epoll_event event = {.events = EPOLLPRI, .data.u64 = FREEZE_EVENT | sandbox->number};
	epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, events, &event);
	freeze_check(sandbox);
	return 0;
}

void sandbox_freeze(const struct request *request)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	bool freezing = request->kind == REQUEST_FREEZE, pending_reply = freezing && cgroup_can_freeze();
	int error = sandbox && !sandbox->ended ? 0 : -ESTALE;

	if (!error) {
		freeze_finish(sandbox, -ECANCELED);
		error = freezing ? freeze(sandbox) : thaw(sandbox);
	}
	if (!error && pending_reply) {
		sandbox->frozen = true;
		error = await_frozen(sandbox, request->serial);
	}
	if (error)
		refuse(request->serial, error, "cannot freeze the sandbox");
	else if (!pending_reply)
		reply(request->serial, 0, sandbox->number, NULL, 0, NULL, 0);
}

void freeze_check(struct sandbox *sandbox)
{
	if (sandbox->freeze_events >= 0 && cgroup_is_frozen(sandbox->freeze_events))
		freeze_finish(sandbox, stop_init(sandbox));
}
