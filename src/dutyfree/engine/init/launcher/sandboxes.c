#define _GNU_SOURCE
#include "launcher/sandboxes.h"

#include "launcher/parked.h"
#include "egress/client.h"
#include "launcher/host.h"
#include "setup/sandbox.h"
#include "sys.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define BOXES 65536u

static struct box *boxes[BOXES];
static uint32_t last_box;

struct box *box_of(uint32_t number)
{
	struct box *box = boxes[number % BOXES];

	return box && box->number == number ? box : NULL;
}

struct box *box_next(uint32_t *at)
{
	while (*at < BOXES) {
		struct box *box = boxes[(*at)++];
		if (box && !box->ended)
			return box;
	}
	return NULL;
}

/* 0 if all are taken. */
static uint32_t free_number(void)
{
	for (uint32_t tried = 0; tried < BOXES; tried++) {
		uint32_t number = ++last_box;
		if (number && !boxes[number % BOXES])
			return number;
	}
	return 0;
}

static bool sound(const struct create *wanted)
{
	if (wanted->flags & CREATE_SHARED_NETWORK && !host.rootless)
		return false;
	if (wanted->trees < 1 || wanted->trees > TREES_MAX || wanted->tree[0].mountpoint[0])
		return false;
	for (uint32_t i = 0; i < wanted->trees; i++) {
		const struct tree *tree = &wanted->tree[i];
		if (tree->count < 1 || tree->count > LAYERS_MAX || !memchr(tree->mountpoint, 0, MOUNTPOINT_MAX) ||
		    tree->mountpoint[0] == '/' || strstr(tree->mountpoint, ".."))
			return false;
	}
	return true;
}

/* What follows struct create, if anything: one string, or else NULL. */
static const char *label_of(const struct request *request, const char *body)
{
	const char *label = body + sizeof(struct create);

	if (request->size == sizeof(struct create))
		return "";
	if (request->size < sizeof(struct create) || request->size > sizeof(struct create) + LABEL_MAX ||
	    body[request->size - 1] || strlen(label) != request->size - sizeof(struct create) - 1)
		return NULL;
	return label;
}

/* A slot with its limits and a process that waits. */
static const char *equip(struct box *box, const struct create *wanted, int *error)
{
	for (int attempt = 0; attempt < 2; attempt++) {
		box->slot = attempt ? slot_make() : slot_take();
		*error = box->slot ? 0 : -errno;
		if (*error)
			return "user namespace, network or control group";
		*error = cgroup_limit(&box->slot->cgroup, wanted);
		if (*error != -EBUSY)
			break;
		/* Memory of a former tenant that cannot be had back at once: not this one's burden. */
		slot_discard(box->slot);
		box->slot = NULL;
	}
	if (*error)
		return "limits";
	if (!box->slot->pid)
		*error = blank_make(box->slot);
	return "clone";
}

/* From this number on, few descriptors are left. */
static int scarce_from(void)
{
	static int number;
	struct rlimit files;

	if (!number)
		number = getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_cur > INT_MAX ? INT_MAX
											   : (int)(files.rlim_cur / 4 * 3);
	return number;
}

static const char *start(struct box *box, const struct create *wanted, const char *label, int *error)
{
	static struct order order;
	const char *step = equip(box, wanted, error);

	if (*error)
		return step;
	/* Made here, so that no process of the sandbox, not even PID 1, has a way to it but the overlay. */
	AUTOCLOSE int used = upper_make(wanted, &box->upper);
	if (used < 0) {
		*error = used;
		return "file system for what is written";
	}
	/* It serves snapshots only: where descriptors run out, more sandboxes are worth more. */
	if (box->upper >= scarce_from())
		close_fd(&box->upper);
	order.wanted = *wanted;
	snprintf(order.label, sizeof order.label, "%s", label);
	*error = blank_order(box->slot, &order, used);
	if (!*error)
		return step;
	/* It died while it waited. */
	blank_discard(box->slot);
	*error = blank_make(box->slot);
	if (!*error)
		*error = blank_order(box->slot, &order, used);
	return step;
}

void box_create(const struct request *request, const char *body)
{
	const struct create *wanted = (const struct create *)(const void *)body;
	const char *label = label_of(request, body);

	if (!label || !sound(wanted)) {
		refuse(request->serial, -EPROTO, "request");
		return;
	}
	struct box *box = calloc(1, sizeof *box);
	int error = -ENOMEM;
	const char *step = "memory";

	if (box) {
		box->number = free_number();
		box->freezing = box->upper = -1;
	}
	if (box && !box->number) {
		error = -EUSERS;
		step = "more than 65,536 sandboxes at once";
	} else if (box) {
		box->trees = wanted->trees;
		box->shared = wanted->flags & CREATE_SHARED_NETWORK;
		step = start(box, wanted, label, &error);
	}
	if (!error) {
		/* Whose end we cannot hear of would be waited for for ever. */
		struct epoll_event event = {.events = EPOLLIN, .data.u64 = box->number};
		if (epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, box->slot->pidfd, &event) < 0) {
			error = -errno;
			step = "epoll";
		}
	}
	if (error) {
		refuse(request->serial, error, step);
		if (box && box->slot)
			slot_discard(box->slot);
		if (box)
			close_fd(&box->upper);
		free(box);
		return;
	}
	boxes[box->number % BOXES] = box;
	reply(request->serial, 0, box->number, NULL, 0, (int[]){box->slot->socket, box->slot->pidfd}, 2);
	/* A socket that we held as well would hide from its owner that the sandbox is gone. */
	close_fd(&box->slot->socket);
}

static void forget(struct box *box)
{
	boxes[box->number % BOXES] = NULL;
	free(box);
}

void box_ended(struct box *box, unsigned wanted_ready)
{
	waitpid(box->slot->pid, NULL, 0);
	box->slot->pid = 0;
	if (box->asked)
		refuse(box->asked, -ESRCH, "network");
	if (box->networked)
		gate_send(EGRESS_CLOSE, box->number, 0, NULL, 0, NULL);
	if (box->opened)
		close_fd(&box->slot->network); /* not one to be used again: routes are left in it */
	/* The owner has it too, so closing alone would not take it out. */
	epoll_ctl(launcher_epoll, EPOLL_CTL_DEL, box->slot->pidfd, NULL);
	close_fd(&box->slot->pidfd);
	close_fd(&box->upper);
	box->ended = true;
	box_freezing_ends(box, -ESTALE);
	if (box->frozen)
		cgroup_freeze(&box->slot->cgroup, false); /* for the next who uses it */
	if (box->awaited)
		reply(box->serial, 0, box->number, NULL, 0, NULL, 0);
	/* What was taken stays charged to the group that it was written in. Who wants no parts ready keeps none. */
	if (!box->taken && wanted_ready > 0 && slot_ready() < wanted_ready + 64)
		slot_return(box->slot);
	else
		slot_discard(box->slot);
	box->slot = NULL;
	forget(box);
}

void box_destroy(const struct request *request)
{
	struct box *box = box_of(request->number);

	if (!box || box->ended) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0); /* it ended by itself */
		return;
	}
	box->awaited = true;
	box->serial = request->serial;
	pidfd_signal(box->slot->pidfd, SIGKILL);
}
