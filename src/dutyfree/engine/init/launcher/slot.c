#include "launcher/slot.h"

#include "egress/netns.h"
#include "launcher/host.h"
#include "launcher/id_ranges.h"
#include "launcher/parked.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PROCESSES (2048 + 2) /* of all users of a sandbox together, with init's two threads; as in Python */

static struct slot *idle, *parked; /* without and with a parked process */
static unsigned idle_count, parked_count, last_number;
static int host_proc = -1, host_netns = -1, host_ipcns = -1;
static char unused_counters[8192]; /* counters of a network namespace that was never used */

int slot_open(int proc)
{
	host_proc = proc;
	host_netns = openat(proc, "self/ns/net", O_RDONLY | O_CLOEXEC);
	host_ipcns = openat(proc, "self/ns/ipc", O_RDONLY | O_CLOEXEC);
	int error = host_netns < 0 || host_ipcns < 0 ? -errno : netns_prepare(host_netns);
	return error ? error : id_range_open();
}

static int write_map(pid_t pid, const char *file, unsigned first)
{
	char path[64], map[64];

	snprintf(path, sizeof path, "%d/%s", pid, file);
	/* Rootless: on the host, our first id lies apart from the others. */
	if (host.rootless && host.ids > 1)
		snprintf(map, sizeof map, "0 0 1\n1 1 %u", host.ids - 1);
	else
		snprintf(map, sizeof map, "0 %u %u", first, host.ids);
	return write_file(host_proc, path, map);
}

/* The child that creates the user namespace. It reports on the socket, and exits when we close our end. The namespace
 * belongs to an id of the sandbox, so per-user limits (inotify watches, pending signals, …) count there and not for
 * root. Without a pids cgroup, RLIMIT_NPROC of this id limits the processes of all users of the sandbox. */
static _Noreturn void userns_child(unsigned creator, bool limit_nproc, int socket)
{
	const struct rlimit processes = {PROCESSES, PROCESSES};
	char byte = 0;

	/* Keep capabilities: some hosts require them to create a user namespace. */
	prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP);
	if (syscall(SYS_setresgid, creator, creator, creator) < 0 || syscall(SYS_setresuid, creator, creator, creator) < 0 ||
	    (limit_nproc && setrlimit(RLIMIT_NPROC, &processes) < 0) || unshare(CLONE_NEWUSER) < 0)
		byte = (char)errno;
	/* Rootless: the id maps of a process that is not dumpable cannot be written. */
	if (host.rootless)
		prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
	if (write(socket, &byte, 1) != 1)
		_exit(1);
	_exit(read(socket, &byte, 1) == 0 ? 0 : 1);
}

static int create_userns(unsigned first, unsigned creator, bool limit_nproc)
{
	char path[64], byte = EPERM;
	int pair[2], fd = -1, error;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	if (pid == 0) {
		close(pair[1]);
		userns_child(creator, limit_nproc, pair[0]);
	}
	error = pid < 0 ? -errno : 0;
	close(pair[0]);
	if (!error && (read(pair[1], &byte, 1) != 1 || byte))
		error = -(byte ? byte : EPERM);
	if (!error)
		error = write_map(pid, "uid_map", first);
	if (!error)
		error = write_map(pid, "gid_map", first);
	if (!error) {
		snprintf(path, sizeof path, "%d/ns/user", pid);
		fd = openat(host_proc, path, O_RDONLY | O_CLOEXEC);
		error = fd < 0 ? -errno : 0;
	}
	close(pair[1]);
	if (pid > 0)
		waitpid(pid, NULL, 0);
	return error ? error : fd;
}

/* Remove a number that the kernel counts for the whole host. */
static void remove_numbers(char *text, const char *name)
{
	while ((text = strstr(text, name)))
		for (text += strlen(name); *text >= '0' && *text <= '9';)
			memmove(text, text + 1, strlen(text));
}

/* Read the counters of the current network namespace: sockets, packets, connection attempts. The next sandbox could
 * read them too, so a changed number would leak information. */
static void read_counters(char *text, size_t size)
{
	static const char *const files[] = {"thread-self/net/sockstat", "thread-self/net/dev", "thread-self/net/snmp",
					    "thread-self/net/snmp6"};
	size_t used = 0;

	for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
		ssize_t more = read_file(host_proc, files[i], text + used, size - used);
		/* A kernel without IPv6 lacks this file everywhere. */
		if (more < 0 && (more != -ENOENT || i == 0)) {
			text[0] = 0;
			return;
		}
		if (i == 0) {
			remove_numbers(text, " orphan ");
			remove_numbers(text, " alloc ");
			remove_numbers(text, " mem ");
		}
		used = strlen(text);
	}
}

/* Runs in the new network namespace. */
static int init_netns(void *netns)
{
	struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};

	if (unshare(CLONE_NEWNET) < 0)
		return errno;
	AUTOCLOSE int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	int error = control < 0 || ioctl(control, SIOCSIFFLAGS, &loopback) < 0 ? errno : 0;
	close_fd(&control);
	/* Processes inside have no CAP_NET_*: allow servers on any port, and ping. */
	write_file(host_proc, "sys/net/ipv4/ip_unprivileged_port_start", "0");
	write_file(host_proc, "sys/net/ipv4/ping_group_range", host.rootless ? "0 0" : "0 2147483647");
	/* TCP Fast Open would connect without connect(), which the seccomp broker counts. */
	write_file(host_proc, "sys/net/ipv4/tcp_fastopen", "0");
	/* Multipath TCP has only one path here; programs fall back to TCP. */
	write_file(host_proc, "sys/net/mptcp/enabled", "0");
	/* Let the kernel forget neighbour entries soon (seccomp_broker.c). */
	write_file(host_proc, "sys/net/ipv6/neigh/lo/gc_stale_time", "1");
	if (!error) {
		*(int *)netns = openat(host_proc, "thread-self/ns/net", O_RDONLY | O_CLOEXEC);
		error = *(int *)netns < 0 ? errno : 0;
	}
	if (!error && !unused_counters[0])
		read_counters(unused_counters, sizeof unused_counters);
	return error;
}

/* Whether nothing was sent in it, and no socket is left, not even in TIME_WAIT. */
static int compare_counters(void *netns)
{
	char found[sizeof unused_counters];

	if (setns(*(int *)netns, CLONE_NEWNET) < 0)
		return errno;
	read_counters(found, sizeof found);
	return found[0] && strcmp(found, unused_counters) == 0 ? 0 : EBUSY;
}

/* Enter the namespace and return. Rootless we could not return, so a child does it. */
static int run_in_namespace(int (*body)(void *), int *argument, int home, int kind)
{
	if (host.rootless)
		return run_child(body, argument, -1);
	int error = body(argument);
	if (setns(home, kind) < 0)
		abort(); /* never go on in the wrong namespace */
	return -error;
}

static int create_netns(void)
{
	int netns = -1;
	int error = run_in_namespace(init_netns, &netns, host_netns, CLONE_NEWNET);

	if (error)
		close_fd(&netns);
	return error ? error : netns;
}

static bool netns_is_unused(int netns)
{
	return run_in_namespace(compare_counters, &netns, host_netns, CLONE_NEWNET) == 0;
}

/* Whether a directory has any entry besides "." and "..": 1, 0, or -errno. There may be very many. */
static int has_entries(int parent)
{
	int fd = openat(parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), entries = 0;
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);

	if (!directory)
		return -errno;
	while (entries < 3 && readdir(directory))
		entries++;
	closedir(directory);
	return entries == 3;
}

/* POSIX message queues are files of an mqueue file system, one per ipc namespace, mounted or not. */
static int find_message_queues(void *pidfd)
{
	if (setns(*(int *)pidfd, CLONE_NEWIPC) < 0)
		return errno;
	AUTOCLOSE int mount = mount_new("mqueue", NULL, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC);
	int found = mount == -ENODEV ? 0 : mount < 0 ? mount : has_entries(mount); /* ENODEV: kernel without mqueue */

	return found > 0 ? ENOTEMPTY : -found;
}

int slot_has_message_queues(const struct slot *slot)
{
	int pidfd = slot->pidfd;

	if (host.without & WALL_NAMESPACES)
		return 0; /* those of the host */
	int error = run_in_namespace(find_message_queues, &pidfd, host_ipcns, CLONE_NEWIPC);

	return error == -ENOTEMPTY ? 1 : error;
}

int slot_open_inside(const struct slot *slot, const char *path)
{
	char root[64];

	snprintf(root, sizeof root, "%d/root", (int)slot->pid);
	AUTOCLOSE int directory = openat(host_proc, root, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (directory < 0)
		return -errno;
	/* The sandbox decides what is there, so follow no link out of it. */
	return open_no_magiclinks(directory, *path ? path : ".", O_PATH | O_DIRECTORY, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
}

bool slot_shares_memory(const struct slot *slot)
{
	AUTOCLOSE int shm = slot_open_inside(slot, "dev/shm");

	return shm < 0 || has_entries(shm) != 0;
}

struct slot *slot_create(void)
{
	struct slot *slot = calloc(1, sizeof *slot);
	int error;

	if (!slot)
		return NULL;
	slot->number = ++last_number;
	slot->netns = slot->user_namespace = slot->pidfd = slot->socket = slot->keeper = -1;
	slot->cgroup = (struct cgroup){.v2_dir = -1, .freezer = -1, .tasks = {-1, -1, -1}};
	error = id_range_claim(&slot->first_id);
	if (!error)
		error = cgroup_create(&slot->cgroup, slot->number, slot->first_id);
	if (!error) {
		slot->creator = id_creator_claim(slot->first_id);
		bool limit_nproc = slot->creator != slot->first_id && slot->cgroup.v2_dir < 0 &&
				   slot->cgroup.tasks[CGROUP_PIDS] < 0;
		if (!(host.without & WALL_USER_NAMESPACE)) {
			slot->user_namespace = create_userns(slot->first_id, slot->creator, limit_nproc);
			error = slot->user_namespace < 0 ? slot->user_namespace : 0;
		}
		if (!error && !(host.without & WALL_NAMESPACES)) {
			slot->netns = create_netns();
			error = slot->netns < 0 ? slot->netns : 0;
		}
	}
	if (!error)
		return slot;
	slot_destroy(slot);
	errno = -error;
	return NULL;
}

static struct slot *pop(struct slot **list, unsigned *count)
{
	struct slot *slot = *list;

	if (slot) {
		*list = slot->next;
		(*count)--;
	}
	return slot;
}

static void push(struct slot *slot)
{
	struct slot **list = slot->pid ? &parked : &idle;

	slot->next = *list;
	*list = slot;
	(*(slot->pid ? &parked_count : &idle_count))++;
}

struct slot *slot_take(void)
{
	struct slot *slot = pop(&parked, &parked_count);

	if (!slot)
		slot = pop(&idle, &idle_count);
	return slot ? slot : slot_create();
}

void slot_return(struct slot *slot)
{
	if (!(host.without & WALL_NAMESPACES) && !netns_is_unused(slot->netns)) {
		close_fd(&slot->netns);
		slot->netns = create_netns();
		if (slot->netns < 0) {
			slot_destroy(slot);
			return;
		}
	}
	if (cgroup_reset_weight(&slot->cgroup))
		slot_destroy(slot); /* its group would keep a low CPU weight */
	else
		push(slot);
}

void slot_destroy(struct slot *slot)
{
	parked_kill(slot);
	close_fd(&slot->user_namespace);
	close_fd(&slot->netns);
	cgroup_remove(&slot->cgroup);
	id_range_release(slot->first_id);
	id_creator_release(slot->creator);
	free(slot);
}

unsigned slot_count(void)
{
	return idle_count + parked_count;
}

bool slot_needs_parked(unsigned target)
{
	return parked_count < target;
}

int slot_prepare(unsigned target)
{
	struct slot *slot = slot_count() < target ? slot_create() : pop(&idle, &idle_count);

	if (!slot)
		return -errno;
	int error = parked_create(slot);
	if (error)
		slot_destroy(slot);
	else
		push(slot);
	return error;
}

void slot_kill_parked(void)
{
	for (struct slot *slot = parked; slot; slot = slot->next)
		pidfd_signal(slot->pidfd, SIGKILL);
	for (struct slot *slot; (slot = pop(&parked, &parked_count));) {
		parked_kill(slot);
		push(slot);
	}
}
