/* Frames to the owner, collected in one buffer and sent with one call at the end of each turn. Code with much data to
 * send checks outbox_size() first. */
#include "pid1/init.h"
#include "sys.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FDS 64
#define BATCH_MAX (64u << 10)    /* a batch may hold back this much */
#define ANSWERS_MAX (1u << 20)   /* with this much unsent, no further answers */
#define BUFFER_KEPT (512u << 10) /* a larger buffer is freed when empty */

static char *buffer;
static size_t begin, end, space;
static struct {
	size_t at; /* sent with the byte at this position */
	int fd;
} attached[FDS];
static unsigned attached_count;
static bool urgent; /* contains a frame that no batch holds back */

/* Move unsent bytes to the beginning. */
static void compact(void)
{
	if (begin < end)
		memmove(buffer, buffer + begin, end - begin);
	for (unsigned i = 0; i < attached_count; i++)
		attached[i].at -= begin;
	end -= begin;
	begin = 0;
}

static char *reserve(size_t size)
{
	if (begin == end || (begin && end + size > space))
		compact();
	if (end + size > space) {
		size_t needed = (end + size) * 2 < 65536 ? 65536 : (end + size) * 2;
		char *larger = realloc(buffer, needed);
		/* We could not answer the owner any more. It sees the socket close. */
		if (!larger)
			_exit(72);
		buffer = larger;
		space = needed;
	}
	end += size;
	return buffer + end - size;
}

void outbox_frame(uint16_t kind, uint16_t flags, uint32_t id, const void *a, size_t a_size, const void *b, size_t b_size)
{
	struct frame head = {.size = (uint32_t)(a_size + b_size), .kind = kind, .flags = flags, .id = id};
	char *at = reserve(sizeof head + a_size + b_size);

	memcpy(at, &head, sizeof head);
	if (a_size)
		memcpy(at + sizeof head, a, a_size);
	if (b_size)
		memcpy(at + sizeof head + a_size, b, b_size);
	/* A batch wakes the owner once, at its end. But with its window used up, the owner sends no more input before
	 * FRAME_TAKEN. */
	if (kind == FRAME_TAKEN || !queue_has_dependents(id))
		urgent = true;
	if (kind == FRAME_EXIT) {
		const struct exit *result = a;
		input_end(id);
		queue_complete(id, result->status == 0 && result->flags == 0);
	} else if (kind == FRAME_DONE) {
		int32_t error;
		memcpy(&error, a, sizeof error);
		input_end(id);
		queue_complete(id, error == 0);
	}
}

void outbox_frame_fd(uint16_t kind, uint16_t flags, uint32_t id, const void *a, size_t a_size, int fd)
{
	while (attached_count == FDS) {
		poll(&(struct pollfd){.fd = CONTROL_FD, .events = POLLOUT}, 1, -1);
		outbox_flush();
	}
	if (begin == end)
		compact();
	attached[attached_count].at = end;
	attached[attached_count++].fd = fd;
	outbox_frame(kind, flags | FRAME_WITH_FD, id, a, a_size, NULL, 0);
}

void outbox_done(uint32_t id, int error)
{
	int32_t number = error < 0 ? -error : error;

	outbox_frame(FRAME_DONE, 0, id, &number, sizeof number, NULL, 0);
}

size_t outbox_size(void)
{
	return end - begin;
}

bool outbox_due(void)
{
	return end - begin > 0 && (urgent || end - begin > BATCH_MAX);
}

bool outbox_full(void)
{
	return end - begin >= ANSWERS_MAX;
}

static void drop_attached(void)
{
	close(attached[0].fd);
	memmove(attached, attached + 1, --attached_count * sizeof *attached);
}

/* The kernel limits descriptors in transit per user (ETOOMANYREFS), and processes in the sandbox may have used that up.
 * Send the frame without its descriptor, as a failure. */
static void fail_attached(int error)
{
	char *at = buffer + begin;
	struct frame head;
	int32_t number = error;

	memcpy(&head, at, sizeof head);
	head.flags &= (uint16_t)~FRAME_WITH_FD;
	memcpy(at, &head, sizeof head);
	if (head.kind == FRAME_DONE)
		memcpy(at + sizeof head, &number, sizeof number);
	drop_attached(); /* closing a terminal hangs it up, which ends its command */
}

void outbox_clear(void)
{
	while (attached_count)
		drop_attached();
	begin = end = 0;
	urgent = false;
}

void outbox_flush(void)
{
	while (begin < end) {
		/* A descriptor goes with the first byte of its frame, so send up to the next frame that has one. */
		bool with_fd = attached_count && attached[0].at == begin;
		unsigned following = with_fd ? 1 : 0;
		size_t part_end = attached_count > following ? attached[following].at : end;
		union {
			struct cmsghdr align;
			char space[CMSG_SPACE(sizeof(int))];
		} control = {0};
		struct iovec part = {buffer + begin, part_end - begin};
		struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
		if (with_fd) {
			message.msg_control = control.space;
			message.msg_controllen = sizeof control.space;
			struct cmsghdr *header = CMSG_FIRSTHDR(&message);
			header->cmsg_level = SOL_SOCKET;
			header->cmsg_type = SCM_RIGHTS;
			header->cmsg_len = CMSG_LEN(sizeof(int));
			memcpy(CMSG_DATA(header), &attached[0].fd, sizeof(int));
		}
		/* As a guest to a non-blocking pipe; SIGPIPE is blocked. */
		ssize_t sent = is_guest ? write(ANSWER_FD, part.iov_base, part.iov_len)
					: sendmsg(CONTROL_FD, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (sent < 0) {
			if (errno == EAGAIN)
				return;
			if (errno == ETOOMANYREFS && with_fd)
				fail_attached(errno);
			else if (errno != EINTR) {
				owner_deaf();
				return;
			}
			continue;
		}
		begin += (size_t)sent;
		if (with_fd)
			drop_attached();
	}
	urgent = false;
	if (space > BUFFER_KEPT) {
		free(buffer);
		buffer = NULL;
		space = 0;
	}
}
