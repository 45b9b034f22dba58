#include "pid1/init.h"

#include "pid1/seccomp_broker.h"
#include "sys.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define SMALL 65536u /* frames up to this size fit into a static buffer */
#define FDS 16
#define TURN_NS 20000000u /* nanoseconds of handling frames before we look after commands and send answers */

static char small[sizeof(struct frame) + SMALL + 1];
static char *inbox = small; /* the frame being read; a larger one gets its own memory */
static size_t have, space = sizeof small - 1;
static int received_fds[FDS]; /* descriptors, in the order of their frames */
static unsigned received_count;
static int epoll;
static bool outlives_owner;
static bool orphaned; /* the owner is gone, and there is no new one yet */

static int take_fd(const struct frame *head)
{
	if (!(head->flags & FRAME_WITH_FD) || received_count == 0)
		return -1;
	int fd = received_fds[0];
	memmove(received_fds, received_fds + 1, --received_count * sizeof *received_fds);
	return fd;
}

/* A NUL follows the payload. */
static int dispatch(const struct frame *head, char *payload, int fd)
{
	size_t size = head->size;
	int error;
	/* A path is one NUL-terminated string. */
	bool is_path = size > 0 && payload[size - 1] == 0 && strlen(payload) == size - 1;

	switch (head->kind) {
	case FRAME_EXEC:
		return command_exec(head->id, payload, size, fd);
	case FRAME_KILL:
		if (!queue_cancel(head->id))
			command_kill(head->id, head->flags & FRAME_SPARE);
		return 0;
	case FRAME_CREDIT:
		return command_credit(head->id, payload, size);
	case FRAME_READ:
		return is_path ? file_read(head->id, payload) : -EPROTO;
	case FRAME_WRITE:
		return file_write(head->id, payload, size, fd);
	case FRAME_LIST:
		return is_path ? file_list(head->id, payload) : -EPROTO;
	case FRAME_REMOVE:
		return is_path ? file_remove(head->id, payload) : -EPROTO;
	case FRAME_UNPACK:
		return is_path && fd >= 0 ? command_worker(head->id, tree_unpack, payload, fd) : -EPROTO;
	case FRAME_PACK:
		if (!is_path)
			return -EPROTO;
		return fd >= 0 ? command_worker(head->id, tree_pack, payload, fd)
			       : command_streamer(head->id, tree_pack, payload, 0);
	case FRAME_SIGNAL_ALL:
		error = command_signal_all(payload, size);
		if (!error)
			outbox_done(head->id, 0);
		return error;
	case FRAME_PING: {
		const struct {
			int32_t error;
			uint32_t killed;
		} answer = {0, oom_report(oom_reported())};
		outbox_frame(FRAME_DONE, 0, head->id, &answer, sizeof answer, NULL, 0);
		return 0;
	}
	case FRAME_TERMINAL:
		return is_guest ? -EOPNOTSUPP : command_terminal(head->id, payload, size);
	case FRAME_EDIT:
		return edit_file(head->id, payload, size);
	case FRAME_SEARCH:
		return search_start(head->id, payload, size);
	case FRAME_WATCH:
		return watch_start(head->id, payload, size);
	case FRAME_SIGNAL_COMMAND:
		return command_signal(head->id, payload, size);
	case FRAME_POSTPONE:
		return command_postpone(payload, size);
	case FRAME_INPUT:
		return input_add(head->id, payload, size);
	case FRAME_VERIFY:
		return verify_all(head->id, payload, size);
	case FRAME_BACKGROUND:
		return priority_background(payload, size);
	case FRAME_SERVICE:
		return service_start(head->id, payload, size, fd);
	case FRAME_CALL:
		return call_start(head->id, payload, size, fd);
	case FRAME_AWAIT:
		return await_start(head->id, payload, size);
	}
	return -EPROTO;
}

/* Closes the descriptor. */
static int perform(const struct frame *head, char *payload, int fd)
{
	int error = dispatch(head, payload, fd);

	if (error)
		outbox_done(head->id, error);
	if (fd >= 0)
		close(fd);
	return error;
}

static void handle(char *frame)
{
	struct frame head;
	char *payload = frame + sizeof head;

	memcpy(&head, frame, sizeof head);
	int fd = take_fd(&head);
	if (is_guest && head.flags & FRAME_WITH_INPUT) {
		fd = input_open(head.id);
		if (fd < 0) {
			queue_note_latest(head.id);
			outbox_done(head.id, fd);
			return;
		}
	}
	if (head.flags & FRAME_AFTER) {
		queue_push(&head, payload, fd);
		return;
	}
	if (head.kind != FRAME_INPUT) /* it belongs to an earlier frame, which may have ended */
		queue_note_latest(head.id);
	char kept = payload[head.size];
	payload[head.size] = 0;
	perform(&head, payload, fd);
	payload[head.size] = kept;
}

/* Remove handled bytes. Return to the static buffer after a large frame. */
static void consume(size_t used)
{
	memmove(inbox, inbox + used, have - used);
	have -= used;
	if (inbox != small && have <= sizeof small - 1) {
		memcpy(small, inbox, have);
		munmap(inbox, space + 1);
		inbox = small;
		space = sizeof small - 1;
	}
}

/* As many as there is time and room for answers. */
static void handle_frames(void)
{
	struct frame head;
	size_t used = 0;
	uint64_t end = now() + TURN_NS;

	while (have - used >= sizeof head && !outbox_full()) {
		memcpy(&head, inbox + used, sizeof head);
		/* The stream cannot be parsed after an impossible size. */
		if (head.size > FRAME_MAX)
			_exit(65);
		if (have - used < sizeof head + head.size || (used && now() >= end))
			break;
		handle(inbox + used);
		used += sizeof head + head.size;
	}
	consume(used);
	if (have >= sizeof head) {
		memcpy(&head, inbox, sizeof head);
		size_t needed = sizeof head + head.size;
		if (needed > space) {
			char *larger = mmap(NULL, needed + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			if (larger == MAP_FAILED)
				_exit(72);
			memcpy(larger, inbox, have);
			if (inbox != small)
				munmap(inbox, space + 1);
			inbox = larger;
			space = needed;
		}
	}
}

static bool has_whole_frame(void)
{
	struct frame head;

	if (have < sizeof head)
		return false;
	memcpy(&head, inbox, sizeof head);
	return have >= sizeof head + head.size;
}

/* Whether there are frames to handle and room for their answers. */
static bool has_work(void)
{
	return !orphaned && !outbox_full() && (has_whole_frame() || queue_ready());
}

/* Handle frames for one turn. If the outbox is full, the rest waits until it has been sent. */
static void serve(void)
{
	uint64_t end = now() + TURN_NS;

	do {
		handle_frames();
		queue_run(perform);
		if (outbox_due() && !orphaned)
			outbox_flush();
	} while (has_work() && now() < end);
}

/* When we exit, the kernel kills all processes of the sandbox. Otherwise commands go on, and their results wait for a
 * new owner. What the former one has half sent or not received is lost. */
static void owner_gone(void)
{
	if (!outlives_owner)
		_exit(0);
	if (orphaned)
		return;
	orphaned = true;
	epoll_ctl(epoll, EPOLL_CTL_DEL, CONTROL_FD, NULL);
	while (received_count)
		close(received_fds[--received_count]);
	have = 0;
	consume(0);
	queue_clear();
	outbox_clear();
}

void owner_deaf(void)
{
	if (!outlives_owner)
		_exit(0);
	outbox_clear();
}

static void receive(void)
{
	int fds[FDS];
	size_t count = 0;

	/* The inbox may be full, and a read of 0 bytes would look like the end of the stream. */
	if (outbox_full() || has_whole_frame())
		return;
	ssize_t size = is_guest ? read(CONTROL_FD, inbox + have, space - have)
				: receive_message(CONTROL_FD, inbox + have, space - have, MSG_DONTWAIT, fds, FDS, &count);
	if (size < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (size <= 0) {
		owner_gone();
		return;
	}
	for (size_t i = 0; i < count; i++) {
		if (received_count < FDS)
			received_fds[received_count++] = fds[i];
		else
			close(fds[i]);
	}
	have += (size_t)size;
	handle_frames();
}

static void watch(int operation, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = {.events = events, .data.u64 = data};

	if (epoll_ctl(epoll, operation, fd, &event) < 0)
		_exit(73);
}

/* Milliseconds until the next deadline, priority update or broker turn; -1 for none. */
static int wait_ms(uint64_t broker_due)
{
	uint64_t first = command_next_deadline(), look = priority_next();

	if (look < first)
		first = look;
	if (broker_due < first)
		first = broker_due;
	if (first == UINT64_MAX)
		return -1;
	uint64_t time = now(), wait = first <= time ? 0 : (first - time) / 1000000u + 1;
	return wait > INT_MAX ? INT_MAX : (int)wait;
}

int payload_group = -1;
bool answers_apart;

/* Wait for what the owner and the outbox allow now. A file gets one watch for both directions: Linux's poll of a virtio
 * port takes what has arrived out of its queue, so that a second watch would learn of it instead of the first one. */
static void watch_owner(int operation)
{
	static uint32_t reading, writing;
	uint32_t in = outbox_full() ? 0 : EPOLLIN, out = outbox_due() ? EPOLLOUT : 0;
	uint32_t first = answers_apart ? in : in | out, second = answers_apart ? out : 0;

	if (operation == EPOLL_CTL_ADD || first != reading)
		watch(operation, CONTROL_FD, first, EVENT_OWNER);
	if (answers_apart && (operation == EPOLL_CTL_ADD || second != writing))
		watch(operation, ANSWER_FD, second, EVENT_OWNER);
	reading = first;
	writing = second;
}

/* The launcher sends the socket of a new owner. */
static void adopt(void)
{
	char byte;
	int fd;
	size_t count;
	ssize_t size = receive_message(KEEPER_FD, &byte, 1, MSG_DONTWAIT, &fd, 1, &count);

	if (size < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (size <= 0) /* the launcher is gone */
		_exit(0);
	if (!count)
		return;
	if (dup3(fd, CONTROL_FD, O_CLOEXEC) < 0)
		_exit(73);
	close(fd);
	orphaned = false;
	command_adopted();
	watch_owner(EPOLL_CTL_ADD);
}

_Noreturn void init_run(int payload, bool kept)
{
	struct epoll_event events[64];
	uint32_t answering = EPOLLIN;
	sigset_t children;

	payload_group = payload;
	outlives_owner = kept;
	epoll = epoll_create1(EPOLL_CLOEXEC);
	sigemptyset(&children);
	sigaddset(&children, SIGCHLD);
	int signals = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
	watch_owner(EPOLL_CTL_ADD);
	watch(EPOLL_CTL_ADD, signals, EPOLLIN, EVENT_CHILDREN);
	if (broker_listener() >= 0)
		watch(EPOLL_CTL_ADD, broker_listener(), EPOLLIN, EVENT_BROKER);
	if (kept)
		watch(EPOLL_CTL_ADD, KEEPER_FD, EPOLLIN, EVENT_KEEPER);
	command_open(epoll);
	verify_open();
	call_open(epoll);
	input_open_table(epoll);
	for (;;) {
		serve();
		command_prepare();
		if (!orphaned)
			watch_owner(EPOLL_CTL_MOD);
		uint64_t broker_due = broker_next();
		uint32_t interest = broker_due == UINT64_MAX ? EPOLLIN : 0;
		if (broker_listener() >= 0 && interest != answering)
			watch(EPOLL_CTL_MOD, broker_listener(), interest, EVENT_BROKER);
		answering = interest;
		int count = epoll_wait(epoll, events, 64, has_work() ? 0 : wait_ms(broker_due));
		for (int i = 0; i < count; i++) {
			uint64_t event = events[i].data.u64;
			/* A new owner waits until we have read the last frames of the former one. */
			if (event == EVENT_KEEPER && orphaned)
				adopt();
			else if (event == EVENT_OWNER && orphaned)
				continue;
			if (event == EVENT_OWNER && events[i].events & EPOLLOUT) {
				outbox_flush();
				command_resume_reading();
			}
			/* If the owner has closed its side, no one reads our answers. */
			if (event == EVENT_OWNER && events[i].events & (EPOLLHUP | EPOLLERR)) {
				owner_deaf();
				receive();
			} else if (event == EVENT_OWNER && events[i].events & EPOLLIN) {
				receive();
			}
			if (event == EVENT_CHILDREN) {
				struct signalfd_siginfo info[8];
				while (read(signals, info, sizeof info) == sizeof info)
					;
				command_reap();
			}
			if (event == EVENT_BROKER)
				broker_serve();
			if (event >= EVENT_INPUTS)
				input_event(event - EVENT_INPUTS);
			else if (event >= EVENT_CALLS)
				call_event(event - EVENT_CALLS);
			else if (event >= EVENT_COMMANDS)
				command_readable((unsigned)((event - EVENT_COMMANDS) / 2), (int)(event - EVENT_COMMANDS) % 2);
		}
		/* A frame that is not handled yet may postpone the deadlines. */
		if (!has_work())
			command_deadlines();
		priority_update(command_running());
	}
}
