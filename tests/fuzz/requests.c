/* The launcher's requests, with all changes to the host replaced. The input is a sequence of events: a kind, two bytes
 * of size, and data. The data is a request, a message of the egress process, or the number of a sandbox that has ended
 * or is frozen. */
#include "launcher/launcher.c"
#include "launcher/sandboxes.c"
#include "egress/netns.h"
#include "jail.h"

#include <sys/eventfd.h>

enum { EVENT_REQUEST, EVENT_EGRESS, EVENT_ENDED, EVENT_FROZEN, EVENTS_COUNT };

static int owner_socket, egress = -1;
static uint32_t last_layer;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	int pair[2];

	(void)argc, (void)argv;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		abort();
	owner = pair[0];
	owner_socket = pair[1];
	launcher_epoll = epoll_create1(EPOLL_CLOEXEC);
	return 0;
}

/* --- Replaces the host --------------------------------------------------------------------------- */

struct slot *__wrap_slot_create(void);
struct slot *__wrap_slot_create(void)
{
	struct slot *slot = calloc(1, sizeof *slot);

	if (!slot)
		abort();
	slot->netns = slot->user_namespace = slot->pidfd = slot->socket = -1;
	slot->cgroup = (struct cgroup){.v2_dir = -1, .freezer = -1, .tasks = {-1, -1, -1}};
	return slot;
}

struct slot *__wrap_slot_take(void);
struct slot *__wrap_slot_take(void)
{
	return __wrap_slot_create();
}

void __wrap_slot_return(struct slot *slot);
void __wrap_slot_return(struct slot *slot)
{
	slot_destroy(slot);
}

int __wrap_slot_has_message_queues(const struct slot *slot);
int __wrap_slot_has_message_queues(const struct slot *slot)
{
	require(slot->pidfd >= 0, "a live sandbox has a pidfd");
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

int __wrap_parked_create(struct slot *slot);
int __wrap_parked_create(struct slot *slot)
{
	slot->pid = NOBODY_PID;
	slot->pidfd = eventfd(0, EFD_CLOEXEC); /* epoll accepts it, like a pidfd */
	slot->socket = jail_memory("", 0);
	return 0;
}

int __wrap_parked_activate(const struct slot *slot, struct activation *activation, int upper);
int __wrap_parked_activate(const struct slot *slot, struct activation *activation, int upper)
{
	(void)slot, (void)upper;
	require(strnlen(activation->label, sizeof activation->label) < LABEL_MAX, "a label is NUL-terminated");
	require(activation->spec.trees >= 1 && activation->spec.trees <= TREES_MAX,
		"the number of trees is within its limit");
	for (uint32_t i = 0; i < activation->spec.trees; i++) {
		const struct tree *tree = &activation->spec.tree[i];
		require(memchr(tree->mountpoint, 0, MOUNTPOINT_MAX) && tree->count <= LAYERS_MAX,
			"a tree is within its limits");
	}
	return 0;
}

int __wrap_layer_add_scratch(int *directory);
int __wrap_layer_add_scratch(int *directory)
{
	*directory = jail_memory("", 0);
	return (int)++last_layer;
}

int __wrap_layer_add_host(const char *path);
int __wrap_layer_add_host(const char *path)
{
	require(path[0] == '/', "host directories are absolute paths");
	return strlen(path) > 100 ? -ENAMETOOLONG : (int)++last_layer;
}

int __wrap_layer_remove(uint32_t number);
int __wrap_layer_remove(uint32_t number)
{
	return number <= last_layer ? 0 : -ENOENT;
}

int __wrap_upper_create(const struct create *spec, int *kept);
int __wrap_upper_create(const struct create *spec, int *kept)
{
	if (!(spec->flags & CREATE_DISK))
		*kept = jail_memory("", 0);
	require(*kept >= 0, "a sandbox has a writable file system");
	return jail_memory("", 0);
}

/* There is a template for this disk limit only. Some images are made later, some not at all. */
#define DISK_LIMIT (1u << 20)
static bool disk_waited;

bool __wrap_disk_has_template(uint64_t size);
bool __wrap_disk_has_template(uint64_t size)
{
	return size == DISK_LIMIT;
}

int __wrap_disk_take(uint64_t size);
int __wrap_disk_take(uint64_t size)
{
	static unsigned turn;

	require(size == DISK_LIMIT, "a sandbox on disk has a template");
	if (disk_waited || turn++ % 2)
		return jail_memory("", 0);
	disk_waited = true;
	return -EAGAIN;
}

static void make_disk(void)
{
	static unsigned turn;

	if (disk_waited)
		sandbox_disk_made(DISK_LIMIT, turn++ % 4 ? 0 : -ENOSPC, "the disk is full");
	disk_waited = false;
	sandbox_disk_made(DISK_LIMIT, 0, ""); /* no request waits */
}

int __wrap_slot_open_inside(const struct slot *slot, const char *path);
int __wrap_slot_open_inside(const struct slot *slot, const char *path)
{
	(void)slot;
	require(memchr(path, 0, MOUNTPOINT_MAX) != NULL, "a mount point is NUL-terminated");
	return jail_memory("", 0);
}

void __wrap_disk_dispose_overlay(int *overlay);
void __wrap_disk_dispose_overlay(int *overlay)
{
	close_fd(overlay);
}

bool __wrap_slot_shares_memory(const struct slot *slot);
bool __wrap_slot_shares_memory(const struct slot *slot)
{
	return slot->number % 2;
}

int __wrap_snapshot_move(int *upper, uint32_t trees, bool force, struct snapshot_layers *layers);
int __wrap_snapshot_move(int *upper, uint32_t trees, bool force, struct snapshot_layers *layers)
{
	require(*upper >= 0 && trees >= 1 && trees <= TREES_MAX, "a sandbox has trees to snapshot");
	for (layers->count = 0; layers->count < trees; layers->count++)
		layers->number[layers->count] = ++last_layer;
	return force ? 0 : -EBUSY;
}

int __wrap_snapshot_copy(int upper, uint32_t trees, uint64_t disk, uint32_t serial);
int __wrap_snapshot_copy(int upper, uint32_t trees, uint64_t disk, uint32_t serial)
{
	(void)serial;
	require(!disk || disk == DISK_LIMIT, "a copy on disk has a template");
	require(upper >= 0 && trees >= 1 && trees <= TREES_MAX, "a sandbox has trees to copy");
	return -EAGAIN;
}

int __wrap_snapshot_merge(const struct merge *spec, int target, uint32_t serial);
int __wrap_snapshot_merge(const struct merge *spec, int target, uint32_t serial)
{
	(void)target, (void)serial;
	require(spec->count >= 1 && spec->count <= LAYERS_MAX, "no more layers than a tree can have");
	return -EAGAIN;
}

int __wrap_cgroup_set_limits(struct cgroup *group, const struct create *spec);
int __wrap_cgroup_set_limits(struct cgroup *group, const struct create *spec)
{
	(void)group;
	return spec->memory == 1 ? -EBUSY : 0;
}

bool __wrap_cgroup_can_freeze(void);
bool __wrap_cgroup_can_freeze(void)
{
	return true;
}

bool __wrap_cgroup_freezer_has_init(void);
bool __wrap_cgroup_freezer_has_init(void)
{
	return true;
}

int __wrap_cgroup_freeze(const struct cgroup *group, bool frozen);
int __wrap_cgroup_freeze(const struct cgroup *group, bool frozen)
{
	(void)group, (void)frozen;
	return 0;
}

int __wrap_cgroup_open_events(const struct cgroup *group);
int __wrap_cgroup_open_events(const struct cgroup *group)
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

int __wrap_netns_open(int netns, int fds[EGRESS_FDS]);
int __wrap_netns_open(int netns, int fds[EGRESS_FDS])
{
	(void)netns;
	for (int i = 0; i < EGRESS_FDS; i++)
		fds[i] = jail_memory("", 0);
	return 0;
}

void __wrap_netns_close(int netns);
void __wrap_netns_close(int netns)
{
	(void)netns;
}

int __wrap_netns_connect(int netns, uint16_t port, int ipv6);
int __wrap_netns_connect(int netns, uint16_t port, int ipv6)
{
	(void)netns, (void)ipv6;
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
	require(pid == NOBODY_PID, "signals go only to started processes");
	return 0;
}

pid_t __wrap_waitpid(pid_t pid, int *status, int options);
pid_t __wrap_waitpid(pid_t pid, int *status, int options)
{
	(void)status, (void)options;
	require(pid == NOBODY_PID, "only started processes are waited for");
	return pid;
}

/* --- Replaces the owner and the egress process --------------------------------------------------- */

/* Read all replies, which must be whole, and count them. */
static unsigned count_replies(void)
{
	static char heard[REQUEST_MAX + 64];
	unsigned count = 0;

	for (;; count++) {
		int fds[4];
		size_t fd_count;
		ssize_t size = receive_message(owner_socket, heard, sizeof heard, MSG_DONTWAIT, fds, 4, &fd_count);
		struct reply head;
		if (size < 0)
			return count;
		require((size_t)size >= sizeof head, "a reply has a header");
		memcpy(&head, heard, sizeof head);
		require(head.size == (size_t)size - sizeof head, "a reply has the size in its header");
		for (size_t i = 0; i < fd_count; i++)
			close(fds[i]);
	}
}

static void send_request(const uint8_t *data, size_t size)
{
	struct request head = {.kind = 0};

	/* An empty message would mean that the owner is gone. */
	if (size == 0 || send(owner_socket, data, size, 0) < 0)
		return;
	if (size >= sizeof head)
		memcpy(&head, data, sizeof head);
	receive();
	make_disk();
	unsigned replies = count_replies();
	/* These are answered later, and may end another request that waits. */
	bool later = head.kind == REQUEST_DESTROY || head.kind == REQUEST_FREEZE || head.kind == REQUEST_THAW ||
		     head.kind == REQUEST_NETWORK;
	require(later ? replies <= 2 : replies == 1, "a request is answered once");
}

static void listen_to_launcher(void)
{
	static char heard[REQUEST_MAX + 64];

	while (egress >= 0 && recv(egress, heard, sizeof heard, MSG_DONTWAIT) > 0)
		;
}

static void play_event(unsigned what, const uint8_t *data, size_t size)
{
	uint32_t number = 0;

	if (size >= sizeof number)
		memcpy(&number, data, sizeof number);
	if (what == EVENT_REQUEST)
		send_request(data, size);
	else if (what == EVENT_EGRESS && egress >= 0 && size > 0 && send(egress, data, size, MSG_NOSIGNAL) > 0)
		handle_event(EGRESS_EVENT);
	else if (number && what == EVENT_ENDED)
		handle_event(number);
	else if (number && what == EVENT_FROZEN)
		handle_event(FREEZE_EVENT | number);
	count_replies();
	listen_to_launcher();
}

/* End all sandboxes. */
static void end_all(void)
{
	for (uint32_t number = 1; number <= last_number; number++) {
		struct sandbox *sandbox = sandbox_find(number);
		if (sandbox && !sandbox->ended)
			sandbox_ended(sandbox, 0);
		count_replies();
		listen_to_launcher();
	}
	egress_client_close();
	close_fd(&egress);
	last_number = last_layer = 0;
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
		play_event(what, data, part);
	}
	end_all();
	return 0;
}
