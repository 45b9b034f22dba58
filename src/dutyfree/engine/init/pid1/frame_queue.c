/* Queued frames: those with FRAME_AFTER wait until the request of the frame before them has ended. A batch is just
 * frames with that flag, so it needs one message of the owner. */
#include "pid1/init.h"
#include "sys.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FRAMES_MAX 4096u
#define BYTES_MAX (64u << 20)

struct queued_frame {
	struct queued_frame *next;
	uint32_t after; /* id of the request that it waits for */
	bool ready, ok; /* whether that has ended, and how */
	int fd;
	struct frame head;
	char payload[];
};

static struct queued_frame *first, **last = &first;
static unsigned count;
static size_t bytes;

/* The owner's latest frame. Only this one may have ended before the next one arrives. */
static struct {
	uint32_t id;
	bool ended, ok;
} latest;

void queue_note_latest(uint32_t id)
{
	latest.id = id;
	latest.ended = false;
}

void queue_push(const struct frame *head, const char *payload, int fd)
{
	size_t size = sizeof(struct queued_frame) + head->size + 1;
	struct queued_frame *queued = count < FRAMES_MAX && bytes + size < BYTES_MAX ? malloc(size) : NULL;

	/* The queue is full: fail this frame, and thereby those that wait for it. */
	if (!queued) {
		if (fd >= 0)
			close(fd);
		queue_note_latest(head->id);
		outbox_done(head->id, -EAGAIN);
		return;
	}
	*queued = (struct queued_frame){
		.after = latest.id, .ready = latest.ended, .ok = latest.ok, .fd = fd, .head = *head};
	memcpy(queued->payload, payload, head->size);
	queued->payload[head->size] = 0;
	*last = queued;
	last = &queued->next;
	count++;
	bytes += size;
	queue_note_latest(head->id);
}

void queue_complete(uint32_t id, bool ok)
{
	if (latest.id == id) {
		latest.ended = true;
		latest.ok = ok;
	}
	for (struct queued_frame *queued = first; queued; queued = queued->next)
		if (queued->after == id && !queued->ready) {
			queued->ready = true;
			queued->ok = ok;
		}
}

bool queue_has_dependents(uint32_t id)
{
	for (const struct queued_frame *queued = first; queued; queued = queued->next)
		if (queued->after == id)
			return true;
	return false;
}

static struct queued_frame *unlink_at(struct queued_frame **at)
{
	struct queued_frame *queued = *at;

	*at = queued->next;
	if (last == &queued->next)
		last = at;
	count--;
	bytes -= sizeof *queued + queued->head.size + 1;
	return queued;
}

bool queue_cancel(uint32_t id)
{
	for (struct queued_frame **at = &first; *at; at = &(*at)->next) {
		if ((*at)->head.id != id)
			continue;
		struct queued_frame *queued = unlink_at(at);
		close_fd(&queued->fd);
		free(queued);
		outbox_done(id, -ECANCELED);
		return true;
	}
	return false;
}

void queue_clear(void)
{
	while (first) {
		struct queued_frame *queued = unlink_at(&first);
		close_fd(&queued->fd);
		free(queued);
	}
}

static struct queued_frame **next_ready(void)
{
	struct queued_frame **at = &first;

	while (*at && !(*at)->ready)
		at = &(*at)->next;
	return at;
}

bool queue_ready(void)
{
	return *next_ready() != NULL;
}

void queue_run(int (*handle)(const struct frame *head, char *payload, int fd))
{
	/* Start over each time: handling a frame may end or cancel others. */
	for (struct queued_frame **at; !outbox_full() && *(at = next_ready());) {
		struct queued_frame *queued = unlink_at(at);
		if (queued->head.flags & FRAME_IF_OK && !queued->ok) {
			close_fd(&queued->fd);
			outbox_done(queued->head.id, -ECANCELED);
		} else {
			handle(&queued->head, queued->payload, queued->fd);
		}
		free(queued);
	}
}
