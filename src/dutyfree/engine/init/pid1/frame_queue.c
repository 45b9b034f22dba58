/* Frames that are not to be handled before what the frame before them asked for has ended: a batch is
 * nothing but frames with that flag, so several actions need one word of the owner and no other. */
#define _GNU_SOURCE
#include "pid1/init.h"
#include "sys.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FRAMES_MAX 4096u
#define BYTES_MAX (64u << 20)

struct waiting {
	struct waiting *next;
	uint32_t after; /* the one whose end it waits for */
	bool ready, ok; /* that has ended, and how */
	int fd;
	struct frame head;
	char payload[];
};

static struct waiting *first, **last = &first;
static unsigned count;
static size_t bytes;

/* The owner's latest frame: the only one that may have ended before its successor came. */
static struct {
	uint32_t id;
	bool ended, ok;
} latest;

void queue_began(uint32_t id)
{
	latest.id = id;
	latest.ended = false;
}

void queue_take(const struct frame *head, const char *payload, int fd)
{
	size_t size = sizeof(struct waiting) + head->size + 1;
	struct waiting *one = count < FRAMES_MAX && bytes + size < BYTES_MAX ? malloc(size) : NULL;

	/* Too many: it is refused, and those that wait for it are. */
	if (!one) {
		if (fd >= 0)
			close(fd);
		queue_began(head->id);
		outbox_done(head->id, -EAGAIN);
		return;
	}
	*one = (struct waiting){
		.after = latest.id, .ready = latest.ended, .ok = latest.ok, .fd = fd, .head = *head};
	memcpy(one->payload, payload, head->size);
	one->payload[head->size] = 0;
	*last = one;
	last = &one->next;
	count++;
	bytes += size;
	queue_began(head->id);
}

void queue_ended(uint32_t id, bool ok)
{
	if (latest.id == id) {
		latest.ended = true;
		latest.ok = ok;
	}
	for (struct waiting *one = first; one; one = one->next)
		if (one->after == id && !one->ready) {
			one->ready = true;
			one->ok = ok;
		}
}

bool queue_holds(uint32_t id)
{
	for (const struct waiting *one = first; one; one = one->next)
		if (one->after == id)
			return true;
	return false;
}

static struct waiting *unlink_at(struct waiting **at)
{
	struct waiting *one = *at;

	*at = one->next;
	if (last == &one->next)
		last = at;
	count--;
	bytes -= sizeof *one + one->head.size + 1;
	return one;
}

bool queue_cancel(uint32_t id)
{
	for (struct waiting **at = &first; *at; at = &(*at)->next) {
		if ((*at)->head.id != id)
			continue;
		struct waiting *one = unlink_at(at);
		close_fd(&one->fd);
		free(one);
		outbox_done(id, -ECANCELED);
		return true;
	}
	return false;
}

static struct waiting **next_ready(void)
{
	struct waiting **at = &first;

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
	/* From the beginning each time: whatever is handled may end, or cancel, others. */
	for (struct waiting **at; !outbox_full() && *(at = next_ready());) {
		struct waiting *one = unlink_at(at);
		if (one->head.flags & FRAME_IF_OK && !one->ok) {
			close_fd(&one->fd);
			outbox_done(one->head.id, -ECANCELED);
		} else {
			handle(&one->head, one->payload, one->fd);
		}
		free(one);
	}
}
