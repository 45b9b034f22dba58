#include "launcher/sandboxes.h"

#include "egress/client.h"
#include "launcher/disk.h"
#include "launcher/host.h"
#include "launcher/layers.h"
#include "launcher/parked.h"
#include "launcher/snapshot.h"
#include "setup/place.h"
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

#define SANDBOXES_MAX 65536u

static struct sandbox *sandboxes[SANDBOXES_MAX];
static uint32_t last_number;

struct sandbox *sandbox_find(uint32_t number)
{
	struct sandbox *sandbox = sandboxes[number % SANDBOXES_MAX];

	return sandbox && sandbox->number == number ? sandbox : NULL;
}

struct sandbox *sandbox_next(uint32_t *at)
{
	while (*at < SANDBOXES_MAX) {
		struct sandbox *sandbox = sandboxes[(*at)++];
		if (sandbox && !sandbox->ended)
			return sandbox;
	}
	return NULL;
}

/* The next free number, 0 if there is none. */
static uint32_t free_number(void)
{
	for (uint32_t tried = 0; tried < SANDBOXES_MAX; tried++) {
		uint32_t number = ++last_number;
		if (number && !sandboxes[number % SANDBOXES_MAX])
			return number;
	}
	return 0;
}

static bool is_valid(const struct create *spec)
{
	bool shared = spec->flags & CREATE_SHARED_NETWORK, unshared = !(host.without & WALL_NAMESPACES);

	if (shared ? unshared && !host.rootless : !unshared)
		return false;
	if (spec->places > PLACES_MAX)
		return false;
	for (uint32_t i = 0; i < spec->places; i++)
		if (!place_is_valid(&spec->place[i]))
			return false;
	if (spec->flags & CREATE_DISK && (host.rootless || !disk_has_template(spec->disk)))
		return false;
	if (spec->trees < 1 || spec->trees > TREES_MAX || spec->tree[0].mountpoint[0])
		return false;
	for (uint32_t i = 0; i < spec->trees; i++) {
		const struct tree *tree = &spec->tree[i];
		if (tree->count < 1 || tree->count > LAYERS_MAX || !memchr(tree->mountpoint, 0, MOUNTPOINT_MAX) ||
		    tree->mountpoint[0] == '/' || strstr(tree->mountpoint, ".."))
			return false;
	}
	return true;
}

/* The label after struct create, "" without one, NULL if it is malformed. */
static const char *parse_label(const struct request *request, const char *body)
{
	const char *label = body + sizeof(struct create);

	if (request->size == sizeof(struct create))
		return "";
	if (request->size < sizeof(struct create) || request->size > sizeof(struct create) + LABEL_MAX ||
	    body[request->size - 1] || strlen(label) != request->size - sizeof(struct create) - 1)
		return NULL;
	return label;
}

/* Take a slot, set its limits, make sure it has a parked process. Returns what it tried last. */
static const char *prepare_slot(struct sandbox *sandbox, const struct create *spec, int *error)
{
	for (int attempt = 0; attempt < 2; attempt++) {
		sandbox->slot = attempt ? slot_create() : slot_take();
		*error = sandbox->slot ? 0 : -errno;
		if (*error)
			return "cannot create a user namespace, network namespace or control group";
		*error = cgroup_set_limits(&sandbox->slot->cgroup, spec);
		if (*error != -EBUSY)
			break;
		/* The slot's group still holds memory of the sandbox before. Take a new slot. */
		slot_destroy(sandbox->slot);
		sandbox->slot = NULL;
	}
	if (*error)
		return "cannot set its limits";
	if (!sandbox->slot->pid)
		*error = parked_create(sandbox->slot);
	return "cannot start its first process";
}

/* From this descriptor number on, we are running out of descriptors. */
static int fd_scarcity_limit(void)
{
	static int number;
	struct rlimit files;

	if (!number)
		number = getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_cur > INT_MAX ? INT_MAX
											   : (int)(files.rlim_cur / 4 * 3);
	return number;
}

static const char *start_sandbox(struct sandbox *sandbox, const struct create *spec, const char *label, int *error)
{
	static struct activation activation;
	const char *step = prepare_slot(sandbox, spec, error);

	if (*error)
		return step;
	/* Created here, so that no process of the sandbox, not even PID 1, can reach it except through the overlay. */
	AUTOCLOSE int used = upper_create(spec, &sandbox->upper);
	if (used < 0) {
		*error = used;
		return "cannot create its writable file system";
	}
	/* Only snapshots need it. When descriptors run out, more sandboxes matter more. */
	if (sandbox->upper >= fd_scarcity_limit())
		close_fd(&sandbox->upper);
	activation.spec = *spec;
	snprintf(activation.label, sizeof activation.label, "%s", label);
	*error = parked_activate(sandbox->slot, &activation, used);
	if (!*error)
		return step;
	/* The parked process died. */
	parked_kill(sandbox->slot);
	*error = parked_create(sandbox->slot);
	if (!*error)
		*error = parked_activate(sandbox->slot, &activation, used);
	return step;
}

/* Requests that wait for a file system on disk, the first one first. */
static struct waiting_create {
	struct waiting_create *next;
	struct request request;
	char body[];
} *waiting;

static int await_disk(const struct request *request, const char *body)
{
	struct waiting_create *create = malloc(sizeof *create + request->size), **last = &waiting;

	if (!create)
		return -ENOMEM;
	create->next = NULL;
	create->request = *request;
	memcpy(create->body, body, request->size);
	while (*last)
		last = &(*last)->next;
	*last = create;
	return 0;
}

void sandbox_disk_made(uint64_t size, int error, const char *step)
{
	struct waiting_create **at = &waiting, *create;

	while (*at && ((const struct create *)(const void *)(*at)->body)->disk != size)
		at = &(*at)->next;
	create = *at;
	if (!create)
		return;
	*at = create->next;
	if (error)
		refuse(create->request.serial, error, step);
	else
		sandbox_create(&create->request, create->body);
	free(create);
}

void sandbox_create(const struct request *request, const char *body)
{
	const struct create *spec = (const struct create *)(const void *)body;
	const char *label = parse_label(request, body);

	if (!label || !is_valid(spec)) {
		refuse(request->serial, -EPROTO, "malformed request");
		return;
	}
	int upper = spec->flags & CREATE_DISK ? disk_take(spec->disk) : -1;
	if (upper == -EAGAIN) {
		int queued = await_disk(request, body);
		if (queued)
			refuse(request->serial, queued, "the launcher is out of memory");
		return;
	}
	if (spec->flags & CREATE_DISK && upper < 0) {
		refuse(request->serial, upper, "cannot start the process that makes file systems");
		return;
	}
	struct sandbox *sandbox = calloc(1, sizeof *sandbox);
	int error = -ENOMEM;
	const char *step = "the launcher is out of memory";

	if (sandbox) {
		sandbox->number = free_number();
		sandbox->freeze_events = -1;
		memset(sandbox->overlay, -1, sizeof sandbox->overlay);
		sandbox->upper = upper;
		sandbox->owned = true;
	}
	if (sandbox && !sandbox->number) {
		error = -EUSERS;
		step = "the launcher already has 65,536 sandboxes, the maximum";
	} else if (sandbox) {
		sandbox->trees = spec->trees;
		sandbox->disk = spec->flags & CREATE_DISK ? spec->disk : 0;
		for (uint32_t i = 0; sandbox->disk && i < spec->trees; i++)
			memcpy(sandbox->mountpoint[i], spec->tree[i].mountpoint, MOUNTPOINT_MAX);
		sandbox->shared_network = spec->flags & CREATE_SHARED_NETWORK;
		step = start_sandbox(sandbox, spec, label, &error);
	}
	if (!error) {
		/* Without an event we would never notice its end. */
		struct epoll_event event = {.events = EPOLLIN, .data.u64 = sandbox->number};
		if (epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, sandbox->slot->pidfd, &event) < 0) {
			error = -errno;
			step = "cannot watch its first process";
		}
	}
	if (error) {
		refuse(request->serial, error, step);
		if (sandbox && sandbox->slot)
			slot_destroy(sandbox->slot);
		if (sandbox)
			upper = sandbox->upper;
		disk_dispose(&upper, true);
		free(sandbox);
		return;
	}
	sandboxes[sandbox->number % SANDBOXES_MAX] = sandbox;
	reply(request->serial, 0, sandbox->number, NULL, 0, (int[]){sandbox->slot->socket, sandbox->slot->pidfd}, 2);
	/* Close our copy: while we hold it, the owner cannot see that the sandbox has ended. */
	close_fd(&sandbox->slot->socket);
}

static void free_sandbox(struct sandbox *sandbox)
{
	sandboxes[sandbox->number % SANDBOXES_MAX] = NULL;
	free(sandbox);
}

static void dispose_upper(struct sandbox *sandbox)
{
	disk_dispose(&sandbox->upper, !sandbox->upper_taken && !sandbox->upper_copied);
	for (uint32_t i = 0; i < TREES_MAX; i++)
		disk_dispose_overlay(&sandbox->overlay[i]);
}

/* When an overlay goes, it writes all files to disk, and the end of PID 1 waits for that. So hold the overlays until
 * the files are removed. */
static void hold_overlays(struct sandbox *sandbox)
{
	for (uint32_t i = 0; sandbox->disk && !sandbox->upper_taken && !sandbox->upper_copied && i < sandbox->trees; i++)
		if (sandbox->overlay[i] < 0)
			sandbox->overlay[i] = slot_open_inside(sandbox->slot, sandbox->mountpoint[i]);
}

void sandbox_ended(struct sandbox *sandbox, unsigned slots_target)
{
	waitpid(sandbox->slot->pid, NULL, 0);
	sandbox->slot->pid = 0;
	if (sandbox->network_serial)
		refuse(sandbox->network_serial, -ESRCH, "the sandbox has ended");
	if (sandbox->has_egress)
		sandbox_close_egress(sandbox);
	if (sandbox->had_egress)
		close_fd(&sandbox->slot->netns); /* not reusable: it has routes */
	/* The owner has the pidfd too, so closing ours does not remove it from epoll. */
	epoll_ctl(launcher_epoll, EPOLL_CTL_DEL, sandbox->slot->pidfd, NULL);
	close_fd(&sandbox->slot->pidfd);
	close_fd(&sandbox->slot->keeper);
	dispose_upper(sandbox);
	sandbox->ended = true;
	freeze_finish(sandbox, -ESTALE);
	if (sandbox->frozen)
		cgroup_freeze(&sandbox->slot->cgroup, false); /* for the slot's next sandbox */
	if (sandbox->destroying)
		reply(sandbox->destroy_serial, 0, sandbox->number, NULL, 0, NULL, 0);
	/* Files that became layers stay charged to the group that wrote them, so the group is not reused. With a target
	 * of 0, keep no slots. */
	if (!sandbox->upper_taken && slots_target > 0 && slot_count() < slots_target + 64)
		slot_return(sandbox->slot);
	else
		slot_destroy(sandbox->slot);
	sandbox->slot = NULL;
	free_sandbox(sandbox);
}

void sandbox_destroy(const struct request *request)
{
	struct sandbox *sandbox = sandbox_find(request->number);

	if (!sandbox || sandbox->ended) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0); /* it has ended before */
		return;
	}
	hold_overlays(sandbox);
	sandbox->destroying = true;
	sandbox->lease = 0;
	sandbox->destroy_serial = request->serial;
	pidfd_signal(sandbox->slot->pidfd, SIGKILL);
}

/* --- Snapshots ----------------------------------------------------------------------------------- */

static void reply_layers(uint32_t serial, int error, const struct snapshot_layers *layers)
{
	struct {
		struct snapshot_usage usage;
		uint32_t number[TREES_MAX];
	} text = {.usage = layers->usage};

	if (error) {
		refuse(serial, error, "cannot write the layer");
		return;
	}
	if (layers->count && !layers_clone_detached())
		slot_kill_parked(); /* their mount namespaces lack the new layers */
	memcpy(text.number, layers->number, sizeof text.number);
	reply(serial, 0, layers->count, &text, sizeof text.usage + layers->count * sizeof *layers->number, NULL, 0);
}

/* Reply when the job ends. */
static void watch_job(int number, uint32_t serial)
{
	if (number < 0) {
		refuse(serial, number, "cannot start the copy");
		return;
	}
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = SNAPSHOT_EVENT | (uint64_t)number};
	epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, snapshot_pidfd(number), &event);
}

void sandbox_snapshot(const struct request *request)
{
	struct sandbox *sandbox = sandbox_find(request->number);
	struct snapshot_layers layers = {.count = 0};
	int error = !sandbox || sandbox->ended ? -ESTALE : sandbox->upper < 0 ? -EMFILE : 0;

	if (!error && request->kind == REQUEST_SNAPSHOT_COPY) {
		sandbox->upper_copied = true;
		watch_job(snapshot_copy(sandbox->upper, sandbox->trees, sandbox->disk, request->serial), request->serial);
		return;
	}
	/* Files in /dev/shm are in no layer. A moved snapshot would lose them. */
	if (!error && request->size == 0 && sandbox->disk && slot_shares_memory(sandbox->slot))
		error = -EBUSY;
	if (!error)
		error = snapshot_move(&sandbox->upper, sandbox->trees, request->size > 0, &layers);
	if (!error)
		sandbox->upper_taken = true;
	reply_layers(request->serial, error, &layers);
}

void snapshot_merge_request(const struct request *request, const char *body, int target)
{
	const struct merge *spec = (const struct merge *)(const void *)body;

	if (request->size != sizeof *spec || spec->own < 1 || spec->own > spec->count ||
	    spec->count > LAYERS_MAX || (spec->disk && !disk_has_template(spec->disk)))
		refuse(request->serial, -EPROTO, "malformed request");
	else
		watch_job(snapshot_merge(spec, target, request->serial), request->serial);
}

void snapshot_job_ended(uint32_t number)
{
	struct snapshot_layers layers;
	uint32_t serial;
	int error = snapshot_finish((int)number, &layers, &serial);

	reply_layers(serial, error, &layers);
}
