#define _GNU_SOURCE
#include "launcher/sandboxes.h"

#include "launcher/layers.h"
#include "launcher/snapshot.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

static void reply_layers(uint32_t serial, int error, const struct snapshot_layers *made)
{
	struct {
		struct snapshot_usage usage;
		uint32_t number[TREES_MAX];
	} text = {.usage = made->usage};

	if (error) {
		refuse(serial, error, "layer");
		return;
	}
	if (made->count && !layers_clone_detached())
		slot_kill_parked(); /* they do not see these */
	memcpy(text.number, made->number, sizeof text.number);
	reply(serial, 0, made->count, &text, sizeof text.usage + made->count * sizeof *made->number, NULL, 0);
}

/* A copy is under way: its end will be answered. */
static void watch_job(int number, uint32_t serial)
{
	if (number < 0) {
		refuse(serial, number, "copy");
		return;
	}
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = SNAPSHOT_EVENT | (uint64_t)number};
	epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, snapshot_pidfd(number), &event);
}

void sandbox_snapshot(const struct request *request)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	struct snapshot_layers made = {.count = 0};
	int error = !sandbox || sandbox->ended ? -ESTALE : sandbox->upper < 0 ? -EMFILE : 0;

	if (!error && request->kind == REQUEST_SNAPSHOT_COPY) {
		watch_job(snapshot_copy(sandbox->upper, sandbox->trees, request->serial), request->serial);
		return;
	}
	if (!error)
		error = snapshot_move(&sandbox->upper, sandbox->trees, request->size > 0, &made);
	if (!error)
		sandbox->upper_taken = true;
	reply_layers(request->serial, error, &made);
}

void snapshot_merge_request(const struct request *request, const char *body, int target)
{
	const struct merge *wanted = (const struct merge *)(const void *)body;

	if (request->size != sizeof *wanted || wanted->own < 1 || wanted->own > wanted->count ||
	    wanted->count > LAYERS_MAX)
		refuse(request->serial, -EPROTO, "request");
	else
		watch_job(snapshot_merge(wanted, target, request->serial), request->serial);
}

void snapshot_job_ended(uint32_t number)
{
	struct snapshot_layers made;
	uint32_t serial;
	int error = snapshot_finish((int)number, &made, &serial);

	reply_layers(serial, error, &made);
}
