/* The launcher's requests, with everything that would change the host replaced. The input is a sequence of events:
 * a byte that says what, a size of two bytes, and that many: a request, a word of the egress process, or four bytes
 * with the number of a sandbox whose processes have ended, or stand still. */
#define _GNU_SOURCE
#include "launcher/launcher.c"
#include "launcher/sandboxes.c"
#include "jail.h"
#include "egress/netns.h"

#include <sys/eventfd.h>

enum { EVENT_REQUEST, EVENT_EGRESS, EVENT_ENDED, EVENT_FROZEN, EVENTS_COUNT };

static int asking, egress = -1;
static uint32_t layers;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	int pair[2];

	(void)argc, (void)argv;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		abort();
	owner = pair[0];
	asking = pair[1];
	launcher_epoll = epoll_create1(EPOLL_CLOEXEC);
	return 0;
}

/* --- In place of the host ---------------------------------------------------------------------------- */

struct slot *__wrap_slot_make(void);
struct slot *__wrap_slot_make(void)
{
	struct slot *slot = calloc(1, sizeof *slot);

	if (!slot)
		abort();
	slot->network = slot->user_namespace = slot->pidfd = slot->socket = -1;
	slot->cgroup = (struct cgroup){.unified = -1, .freezer = -1, .tasks = {-1, -1, -1}};
	return slot;
}

struct slot *__wrap_slot_take(void);
struct slot *__wrap_slot_take(void)
{
	return __wrap_slot_make();
}

void __wrap_slot_return(struct slot *slot);
void __wrap_slot_return(struct slot *slot)
{
	slot_discard(slot);
}

int __wrap_slot_keeps_messages(const struct slot *slot);
int __wrap_slot_keeps_messages(const struct slot *slot)
{
	claim(slot->pidfd >= 0, "a sandbox that lives has a process");
	return 0;
}

ssize_t __wrap_cgroup_read(const struct cgroup *group, int kind, const char *file, char *text, size_t size);
ssize_t __wrap_cgroup_read(const struct cgroup *group, int kind, const char *file, char *text, size_t size)
{
	static const char *const said[] = {"max\n", "-1\n", "1048576\n", "rss 1\nshmem 99999999999999999999\n", ""};
	static unsigned turn;

	(void)group, (void)kind, (void)file;
	return snprintf(text, size, "%s", said[turn++ % (sizeof said / sizeof *said)]);
}

int __wrap_blank_make(struct slot *slot);
int __wrap_blank_make(struct slot *slot)
{
	slot->pid = NOBODY_PID;
	slot->pidfd = eventfd(0, EFD_CLOEXEC); /* one that can be waited for, as its own could */
	slot->socket = jail_memory("", 0);
	return 0;
}

int __wrap_blank_order(const struct slot *slot, struct order *order, int upper);
int __wrap_blank_order(const struct slot *slot, struct order *order, int upper)
{
	(void)slot, (void)upper;
	claim(strnlen(order->label, sizeof order->label) < LABEL_MAX, "a label has an end");
	claim(order->wanted.trees >= 1 && order->wanted.trees <= TREES_MAX, "trees as many as there may be");
	for (uint32_t i = 0; i < order->wanted.trees; i++) {
		const struct tree *tree = &order->wanted.tree[i];
		claim(memchr(tree->mountpoint, 0, MOUNTPOINT_MAX) && tree->count <= LAYERS_MAX, "a tree within its bounds");
	}
	return 0;
}

int __wrap_layer_scratch(int *directory);
int __wrap_layer_scratch(int *directory)
{
	*directory = jail_memory("", 0);
	return (int)++layers;
}

int __wrap_layer_of_host(const char *path);
int __wrap_layer_of_host(const char *path)
{
	claim(path[0] == '/', "a directory of the host is named by its whole path");
	return strlen(path) > 100 ? -ENAMETOOLONG : (int)++layers;
}

int __wrap_layer_forget(uint32_t number);
int __wrap_layer_forget(uint32_t number)
{
	return number <= layers ? 0 : -ENOENT;
}

int __wrap_upper_make(const struct create *wanted, int *kept);
int __wrap_upper_make(const struct create *wanted, int *kept)
{
	(void)wanted;
	*kept = jail_memory("", 0);
	return jail_memory("", 0);
}

int __wrap_snapshot_take(int upper, uint32_t trees, bool anyway, struct layers *made);
int __wrap_snapshot_take(int upper, uint32_t trees, bool anyway, struct layers *made)
{
	claim(upper >= 0 && trees >= 1 && trees <= TREES_MAX, "a sandbox has trees to take");
	for (made->count = 0; made->count < trees; made->count++)
		made->number[made->count] = ++layers;
	return anyway ? 0 : -EBUSY;
}

int __wrap_snapshot_copy(int upper, uint32_t trees, uint32_t serial);
int __wrap_snapshot_copy(int upper, uint32_t trees, uint32_t serial)
{
	(void)serial;
	claim(upper >= 0 && trees >= 1 && trees <= TREES_MAX, "a sandbox has trees to copy");
	return -EAGAIN;
}

int __wrap_snapshot_merge(const struct merge *wanted, int target, uint32_t serial);
int __wrap_snapshot_merge(const struct merge *wanted, int target, uint32_t serial)
{
	(void)target, (void)serial;
	claim(wanted->count >= 1 && wanted->count <= LAYERS_MAX, "as many layers as a tree has");
	return -EAGAIN;
}

int __wrap_cgroup_limit(struct cgroup *group, const struct create *wanted);
int __wrap_cgroup_limit(struct cgroup *group, const struct create *wanted)
{
	(void)group;
	return wanted->memory == 1 ? -EBUSY : 0;
}

bool __wrap_cgroup_freezes(void);
bool __wrap_cgroup_freezes(void)
{
	return true;
}

bool __wrap_cgroup_freezes_init(void);
bool __wrap_cgroup_freezes_init(void)
{
	return true;
}

int __wrap_cgroup_freeze(const struct cgroup *group, bool frozen);
int __wrap_cgroup_freeze(const struct cgroup *group, bool frozen)
{
	(void)group, (void)frozen;
	return 0;
}

int __wrap_cgroup_events(const struct cgroup *group);
int __wrap_cgroup_events(const struct cgroup *group)
{
	static unsigned turn;

	(void)group;
	return turn++ % 2 ? jail_memory("frozen 1\n", 9) : jail_memory("frozen 0\n", 9);
}

int __wrap_egress_start(pid_t *pid);
int __wrap_egress_start(pid_t *pid)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		abort();
	*pid = NOBODY_PID;
	close_fd(&egress);
	egress = pair[1];
	return pair[0];
}

int __wrap_network_open(int network, int way[WAY_FDS]);
int __wrap_network_open(int network, int way[WAY_FDS])
{
	(void)network;
	for (int i = 0; i < WAY_FDS; i++)
		way[i] = jail_memory("", 0);
	return 0;
}

void __wrap_network_close(int network);
void __wrap_network_close(int network)
{
	(void)network;
}

int __wrap_network_connect(int network, uint16_t port, int ipv6);
int __wrap_network_connect(int network, uint16_t port, int ipv6)
{
	(void)network, (void)ipv6;
	return port ? jail_memory("", 0) : -ECONNREFUSED;
}

void __wrap_probe_describe(char *text, size_t size);
void __wrap_probe_describe(char *text, size_t size)
{
	snprintf(text, size, "nothing=0");
}

int __wrap_pidfd_signal(int pidfd, int signal);
int __wrap_pidfd_signal(int pidfd, int signal)
{
	(void)pidfd, (void)signal;
	return 0;
}

int __wrap_kill(pid_t pid, int number);
int __wrap_kill(pid_t pid, int number)
{
	(void)number;
	claim(pid == NOBODY_PID, "signals go to those that were started");
	return 0;
}

pid_t __wrap_waitpid(pid_t pid, int *status, int options);
pid_t __wrap_waitpid(pid_t pid, int *status, int options)
{
	(void)status, (void)options;
	claim(pid == NOBODY_PID, "those are awaited that were started");
	return pid;
}

/* --- In place of the owner and the egress process ------------------------------------------------------ */

/* How many replies there are, which must be whole. */
static unsigned hear(void)
{
	static char heard[REQUEST_MAX + 64];
	unsigned count = 0;

	for (;; count++) {
		union {
			struct cmsghdr align;
			char space[CMSG_SPACE(4 * sizeof(int))];
		} control;
		struct iovec part = {heard, sizeof heard};
		struct msghdr message = {.msg_iov = &part,
					 .msg_iovlen = 1,
					 .msg_control = control.space,
					 .msg_controllen = sizeof control.space};
		ssize_t size = recvmsg(asking, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
		struct reply head;
		if (size < 0)
			return count;
		claim((size_t)size >= sizeof head, "a reply has a head");
		memcpy(&head, heard, sizeof head);
		claim(head.size == (size_t)size - sizeof head, "a reply has its size");
		struct cmsghdr *with = CMSG_FIRSTHDR(&message);
		for (size_t i = 0; with && i < (with->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(with) + i * sizeof fd, sizeof fd);
			close(fd);
		}
	}
}

static void ask(const uint8_t *data, size_t size)
{
	struct request head = {.kind = 0};

	/* An empty one would be the owner's end. */
	if (size == 0 || send(asking, data, size, 0) < 0)
		return;
	if (size >= sizeof head)
		memcpy(&head, data, sizeof head);
	receive();
	unsigned replies = hear();
	/* These are answered when it is done, and may then end another's waiting. */
	bool later = head.kind == REQUEST_DESTROY || head.kind == REQUEST_FREEZE || head.kind == REQUEST_THAW ||
		     head.kind == REQUEST_NETWORK;
	claim(later ? replies <= 2 : replies == 1, "a request is answered once");
}

static void listen_to_launcher(void)
{
	static char heard[REQUEST_MAX + 64];

	while (egress >= 0 && recv(egress, heard, sizeof heard, MSG_DONTWAIT) > 0)
		;
}

static void happen(unsigned what, const uint8_t *data, size_t size)
{
	uint32_t number = 0;

	if (size >= sizeof number)
		memcpy(&number, data, sizeof number);
	if (what == EVENT_REQUEST)
		ask(data, size);
	else if (what == EVENT_EGRESS && egress >= 0 && size > 0 && send(egress, data, size, MSG_NOSIGNAL) > 0)
		happened(EGRESS_EVENT);
	else if (number && what == EVENT_ENDED)
		happened(number);
	else if (number && what == EVENT_FROZEN)
		happened(FREEZE_EVENT | number);
	hear();
	listen_to_launcher();
}

/* All sandboxes end, and nothing of them is left. */
static void end_all(void)
{
	for (uint32_t number = 1; number <= last_box; number++) {
		struct box *box = box_of(number);
		if (box && !box->ended)
			box_ended(box, 0);
		hear();
		listen_to_launcher();
	}
	gate_close();
	close_fd(&egress);
	last_box = layers = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	for (uint16_t part; size >= 3; data += part, size -= part) {
		unsigned what = data[0] % EVENTS_COUNT;
		memcpy(&part, data + 1, sizeof part);
		data += 3;
		size -= 3;
		if (part > size)
			part = (uint16_t)size;
		happen(what, data, part);
	}
	end_all();
	return 0;
}
