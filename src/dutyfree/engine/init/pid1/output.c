/* Output of commands: send the head, keep the tail, count the middle. Memory is bounded. */
#include "pid1/command.h"
#include "sys.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK (64u << 10)
#define PIPE_MAX (1u << 20)      /* maximum size of a pipe */
#define OUTBOX_HIGH (256u << 10) /* with this much unsent, do not read output that would be sent */

static void send_buffer(struct command *command, int number)
{
	struct stream *stream = &command->streams[number];

	if (stream->used)
		outbox_frame(FRAME_OUTPUT, (uint16_t)(number + 1), command->id, stream->buffer, stream->used, NULL, 0);
	stream->used = 0;
}

static void keep_tail(const struct command *command, struct stream *stream, const char *data, size_t size)
{
	size_t space = command->request.tail;

	if (space && !stream->tail)
		stream->tail = malloc(space);
	stream->tail_total += size;
	if (!stream->tail)
		return;
	if (size > space) {
		data += size - space;
		size = space;
	}
	size_t at = (stream->tail_total - size) % space;
	size_t first = size < space - at ? size : space - at;
	memcpy(stream->tail + at, data, first);
	memcpy(stream->tail, data + first, size - first);
}

static void accept_output(struct command *command, int number, const char *data, size_t size)
{
	struct stream *stream = &command->streams[number];

	stream->total += size;
	if (command->request.flags & EXEC_STREAM) {
		outbox_frame(FRAME_OUTPUT, (uint16_t)(number + 1), command->id, data, size, NULL, 0);
		stream->passed += size;
		command->credit -= (int64_t)(size + FRAME_COST);
		return;
	}
	uint64_t room = command->request.head - stream->passed;
	size_t passing = size < room ? size : (size_t)room;
	if (passing && !stream->buffer)
		stream->buffer = malloc(CHUNK);
	if (passing && stream->buffer) {
		if (stream->used + passing > CHUNK)
			send_buffer(command, number);
		memcpy(stream->buffer + stream->used, data, passing);
		stream->used += passing;
		stream->passed += passing;
		data += passing;
		size -= passing;
	}
	if (size)
		keep_tail(command, stream, data, size);
}

bool output_can_read(const struct command *command, const struct stream *stream)
{
	if (command->request.flags & EXEC_STREAM)
		return command->credit > 0 && outbox_size() < OUTBOX_HIGH;
	return stream->passed >= command->request.head || outbox_size() < OUTBOX_HIGH;
}

size_t output_read(struct command *command, int number)
{
	static char chunk[CHUNK];
	struct stream *stream = &command->streams[number];
	ssize_t size = read(stream->fd, chunk, sizeof chunk);

	if (size > 0)
		accept_output(command, number, chunk, (size_t)size);
	else if (size == 0 || (errno != EAGAIN && errno != EINTR))
		close_fd(&stream->fd);
	return size > 0 ? (size_t)size : 0;
}

static void send_tail(struct command *command, int number)
{
	struct stream *stream = &command->streams[number];
	size_t space = command->request.tail;
	size_t kept = !stream->tail ? 0 : stream->tail_total < space ? (size_t)stream->tail_total : space;
	size_t at = space ? (stream->tail_total - kept) % space : 0;
	size_t first = kept < space - at ? kept : space - at;

	if (kept)
		outbox_frame(FRAME_OUTPUT, (uint16_t)(number + 1), command->id, stream->tail + at, first, stream->tail,
			     kept - first);
	command->result.total[number] = stream->total;
	command->result.cut[number] = stream->total - stream->passed - kept;
}

static void drain(struct command *command, int number)
{
	size_t left = PIPE_MAX;

	/* At most one pipe's content: a background child may keep writing. */
	for (size_t size; command->streams[number].fd >= 0 && left > 0 && (size = output_read(command, number)) > 0;)
		left -= size + FRAME_COST < left ? size + FRAME_COST : left;
}

void output_finish(struct command *command, int number)
{
	if (command->streams[number].fd >= 0)
		drain(command, number);
	send_buffer(command, number);
	send_tail(command, number);
}
