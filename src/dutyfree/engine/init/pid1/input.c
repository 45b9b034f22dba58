/* In-band input: on a byte stream no descriptor can travel with a frame. A request with FRAME_WITH_INPUT gets the read
 * end of a pipe instead, and FRAME_INPUT brings what is written into the pipe.
 *
 * The owner sends at most INPUT_WINDOW bytes that are not taken yet. FRAME_TAKEN reports how many the pipe took, so a
 * request that does not read blocks neither init nor other requests. There are at most two reports for each frame of
 * input, which has at most REPORT_AT bytes, and none follows a report of 0. The owner relies on that (in_band.py). */
#include "pid1/init.h"
#include "sys.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define INPUTS_MAX 256
#define REPORT_AT (INPUT_WINDOW / 4) /* report after this many bytes, or when all are taken */

struct input {
	int fd; /* write end of the pipe; -1 for an unused entry */
	uint32_t id;
	uint32_t taken; /* bytes that are not reported yet */
	bool ended;     /* no more comes */
	bool waiting;   /* for room in the pipe */
	char *data;     /* what the pipe has not taken */
	size_t begin, end;
};

static struct input inputs[INPUTS_MAX];
static unsigned highest; /* entries from here on are unused */
static int epoll;

void input_open_table(int fd)
{
	epoll = fd;
}

static struct input *find(uint32_t id)
{
	for (unsigned i = 0; i < highest; i++)
		if (inputs[i].fd >= 0 && inputs[i].id == id)
			return &inputs[i];
	return NULL;
}

static void drop(struct input *input)
{
	/* A worker that has not closed its descriptors yet would keep it in the epoll. */
	epoll_ctl(epoll, EPOLL_CTL_DEL, input->fd, NULL);
	close_fd(&input->fd);
	free(input->data);
	input->data = NULL;
	while (highest > 0 && inputs[highest - 1].fd < 0)
		highest--;
}

static void report(struct input *input, uint32_t size)
{
	outbox_frame(FRAME_TAKEN, 0, input->id, &size, sizeof size, NULL, 0);
	input->taken = 0;
}

static void set_waiting(struct input *input, bool waiting, int operation)
{
	struct epoll_event event = {.events = waiting ? EPOLLOUT : 0,
				    .data.u64 = EVENT_INPUTS + (uint64_t)(input - inputs)};

	/* Without events, EPOLLERR still tells that the last reader is gone. */
	if (operation == EPOLL_CTL_ADD || waiting != input->waiting)
		epoll_ctl(epoll, operation, input->fd, &event);
	input->waiting = waiting;
}

int input_open(uint32_t id)
{
	unsigned index = 0;
	int ends[2];

	while (index < highest && inputs[index].fd >= 0)
		index++;
	if (index == INPUTS_MAX || find(id))
		return -EAGAIN;
	if (pipe2(ends, O_CLOEXEC) < 0)
		return -errno;
	fcntl(ends[1], F_SETFL, O_NONBLOCK);
	struct input *input = &inputs[index];
	*input = (struct input){.fd = ends[1], .id = id};
	if (index >= highest)
		highest = index + 1;
	set_waiting(input, false, EPOLL_CTL_ADD);
	return ends[0];
}

/* Write what the pipe takes. Returns false if the input is dropped. */
static bool flush(struct input *input)
{
	while (input->begin < input->end) {
		ssize_t count = write(input->fd, input->data + input->begin, input->end - input->begin);
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0 && errno == EAGAIN)
			break;
		if (count < 0) { /* nobody reads it any more */
			report(input, 0);
			drop(input);
			return false;
		}
		input->begin += (size_t)count;
		input->taken += (uint32_t)count;
	}
	bool empty = input->begin == input->end;
	if (empty)
		input->begin = input->end = 0;
	if (empty && input->ended) {
		drop(input);
		return false;
	}
	if (input->taken && !input->ended && (empty || input->taken >= REPORT_AT))
		report(input, input->taken);
	set_waiting(input, !empty, EPOLL_CTL_MOD);
	return true;
}

int input_add(uint32_t id, const char *data, size_t size)
{
	struct input *input = find(id);

	if (!input) /* its request has ended, or nobody reads it */
		return 0;
	if (size == 0) {
		input->ended = true;
		flush(input);
		return 0;
	}
	if (input->ended || input->end - input->begin + size > INPUT_WINDOW) {
		drop(input);
		return -EPROTO;
	}
	if (!input->data)
		input->data = malloc(INPUT_WINDOW);
	if (!input->data) {
		report(input, 0);
		drop(input);
		return 0;
	}
	memmove(input->data, input->data + input->begin, input->end - input->begin);
	input->end -= input->begin;
	input->begin = 0;
	memcpy(input->data + input->end, data, size);
	input->end += size;
	flush(input);
	return 0;
}

void input_event(uint64_t index)
{
	struct input *input = index < highest ? &inputs[index] : NULL;

	/* It may have been dropped in this same turn, and its entry used again: then the event was of another one. */
	if (!input || input->fd < 0)
		return;
	struct pollfd found = {.fd = input->fd, .events = POLLOUT};
	if (poll(&found, 1, 0) > 0 && found.revents & POLLERR) {
		report(input, 0);
		drop(input);
	} else {
		flush(input);
	}
}

void input_end(uint32_t id)
{
	struct input *input = highest ? find(id) : NULL;

	if (input)
		drop(input);
}
