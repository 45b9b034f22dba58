#define _GNU_SOURCE
#include "launcher/sandboxes.h"

#include "launcher/layers.h"
#include "launcher/snapshot.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

static void answer(uint32_t serial, int error, const struct layers *made)
{
	struct {
		struct kept kept;
		uint32_t number[TREES_MAX];
	} text = {.kept = made->kept};

	if (error) {
		refuse(serial, error, "layer");
		return;
	}
	if (made->count && !layers_float())
		slot_undress(); /* they do not see these */
	memcpy(text.number, made->number, sizeof text.number);
	reply(serial, 0, made->count, &text, sizeof text.kept + made->count * sizeof *made->number, NULL, 0);
}

/* A copy is under way: its end will be answered. */
static void attend(int number, uint32_t serial)
{
	if (number < 0) {
		refuse(serial, number, "copy");
		return;
	}
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = COPY_EVENT | (uint64_t)number};
	epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, snapshot_pidfd(number), &event);
}

void box_keep(const struct request *request)
{
	struct box *box = box_of(request->number);
	struct layers made = {.count = 0};
	int error = !box || box->ended ? -ESTALE : box->upper < 0 ? -EMFILE : 0;

	if (!error && request->kind == REQUEST_COPY) {
		attend(snapshot_copy(box->upper, box->trees, request->serial), request->serial);
		return;
	}
	if (!error)
		error = snapshot_take(&box->upper, box->trees, request->size > 0, &made);
	if (!error)
		box->taken = true;
	answer(request->serial, error, &made);
}

void layers_merge(const struct request *request, const char *body, int target)
{
	const struct merge *wanted = (const struct merge *)(const void *)body;

	if (request->size != sizeof *wanted || wanted->own < 1 || wanted->own > wanted->count ||
	    wanted->count > LAYERS_MAX)
		refuse(request->serial, -EPROTO, "request");
	else
		attend(snapshot_merge(wanted, target, request->serial), request->serial);
}

void copy_ended(uint32_t number)
{
	struct layers made;
	uint32_t serial;
	int error = snapshot_ended((int)number, &made, &serial);

	answer(serial, error, &made);
}
