#include "setup/sandbox.h"

#include "launcher/fd_handover.h"
#include "launcher/host.h"
#include "launcher/layers.h"
#include "launcher/parked.h"
#include "launcher/title.h"
#include "pid1/init.h"
#include "pid1/seccomp_broker.h"
#include "setup/place.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <fcntl.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <linux/securebits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Parts of /proc that a sandbox cannot read. Docker masks some of them. The others identify or count the host's disks,
 * devices and users; show the load of the whole host (pressure, where any reader can make the kernel poll); or block
 * every file lock of the host while they are read (locks). Files that only the host's root can read need no mask: no
 * user of a sandbox is the host's root. */
static struct mask {
	const char *path, *cover;
	bool needed;
} masks[] = {
	{"proc/acpi", "/mask/directory", false},      {"proc/asound", "/mask/directory", false},
	{"proc/scsi", "/mask/directory", false},      {"proc/interrupts", "/mask/file", false},
	{"proc/kcore", "/mask/file", false},          {"proc/keys", "/mask/file", false},
	{"proc/latency_stats", "/mask/file", false},  {"proc/sched_debug", "/mask/file", false},
	{"proc/sysrq-trigger", "/mask/file", false},  {"proc/timer_list", "/mask/file", false},
	{"proc/timer_stats", "/mask/file", false},    {"proc/pressure", "/mask/directory", false},
	{"proc/locks", "/mask/file", false},          {"proc/fs", "/mask/directory", false},
	{"proc/bus", "/mask/directory", false},       {"proc/irq", "/mask/directory", false},
	{"proc/diskstats", "/mask/file", false},      {"proc/partitions", "/mask/file", false},
	{"proc/softirqs", "/mask/file", false},       {"proc/schedstat", "/mask/file", false},
	{"proc/key-users", "/mask/file", false},
};
#define MASKS (sizeof masks / sizeof *masks)

#define FILES 65536 /* open files per process */

static int control; /* the socket to the owner; fail() reports on it */
static const struct slot *own_slot;
static struct activation activation;
static int upper_fd, detached_fds[DETACHED_MAX]; /* received with it: the writable file system, and detached layers */

static _Noreturn void fail(const char *step, int error)
{
	struct frame header = {.kind = FRAME_FATAL};
	char payload[128];
	int32_t number = error < 0 ? -error : error;

	memcpy(payload, &number, sizeof number);
	int size = snprintf(payload + sizeof number, sizeof payload - sizeof number, "cannot %s", step);
	header.size = (uint32_t)(sizeof number + (size_t)size);
	send_message(control, &header, sizeof header, payload, header.size, NULL, 0);
	_exit(71);
}

static void must(int result, const char *step)
{
	if (result < 0)
		fail(step, result);
}

static void must_call(long result, const char *step)
{
	if (result < 0)
		fail(step, errno);
}

static int create_tmpfs(const struct create *spec)
{
	char size[32], path[16];
	const char *options[][2] = {{"mode", "0755"}, {"size", size}, {"nr_inodes", "0"}, {NULL, NULL}};
	uint64_t inodes = spec->disk / 4096 + 1024;
	char count[32];

	snprintf(size, sizeof size, "%llu", (unsigned long long)spec->disk);
	snprintf(count, sizeof count, "%llu", (unsigned long long)inodes);
	options[2][1] = count; /* limit the inodes: they use memory too, even for empty files */
	int mount = mount_new("tmpfs", (const char *const(*)[2])options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	if (mount < 0)
		return mount;
	for (uint32_t i = 0; i < spec->trees; i++) {
		snprintf(path, sizeof path, "u%u", i);
		if (mkdirat(mount, path, 0755) < 0)
			goto failed;
		path[0] = 'w';
		if (mkdirat(mount, path, 0755) < 0)
			goto failed;
	}
	if (mkdirat(mount, "shm", 01777) == 0)
		return mount;
failed:;
	int error = -errno;
	close(mount);
	return error;
}

int upper_create(const struct create *spec, int *kept)
{
	if (!(spec->flags & CREATE_DISK))
		*kept = create_tmpfs(spec);
	if (*kept < 0)
		return *kept;
	int used = mount_clone(*kept, "", false);
	if (used != -EINVAL)
		return used;
	/* Before Linux 6.15 only an attached mount can be cloned. */
	int error = mount_attach(*kept, "/up");
	close_fd(kept);
	if (error)
		return error;
	*kept = mount_clone(AT_FDCWD, "/up", false);
	used = mount_clone(AT_FDCWD, "/up", false);
	umount2("/up", MNT_DETACH);
	return *kept < 0 ? *kept : used;
}

/* Rootless, or without a user namespace, the sandbox has the ids of the launcher: there is nothing to map. */
static int idmap_userns(void)
{
	return host.rootless || host.without & WALL_USER_NAMESPACE ? -1 : own_slot->user_namespace;
}

static int clone_layer(uint32_t number, const char *path)
{
	for (uint32_t i = 0; i < activation.detached; i++)
		if (activation.number[i] == number)
			return mount_clone(detached_fds[i], "", false);
	return mount_clone(AT_FDCWD, path, false);
}

/* Mount one tree: overlayfs of its layers, read-only and idmapped, under a directory of the upper file system. */
static void mount_tree(const struct create *spec, uint32_t index)
{
	const struct tree *tree = &spec->tree[index];
	char lower[LAYERS_MAX * LAYER_PATH], path[MOUNTPOINT_MAX + 8], up[16], work[16];
	const char *options[][2] = {{"source", "overlay"},     {"lowerdir", lower},     {"upperdir", up},
				    {"workdir", work},         {"redirect_dir", "on"},  {"metacopy", "on"},
				    {NULL, NULL}};
	/* Without root, overlayfs must store its xattrs as user.*, which excludes redirect_dir and metacopy. */
	if (host.rootless) {
		options[4][0] = "userxattr";
		options[4][1] = NULL;
		options[5][0] = NULL;
	}
	char *end = lower;

	for (uint32_t i = 0; i < tree->count; i++) {
		char layer[LAYER_PATH];
		layer_path(layer, tree->layers[i]);
		AUTOCLOSE int mount = clone_layer(tree->layers[i], layer);
		must(mount, "clone the mount of a layer");
		const uint64_t attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
		int error = mount_restrict(mount, attributes, idmap_userns());
		/* Some file systems have no idmapped mounts: files of root then show as nobody's in the sandbox. */
		if (error == -EINVAL)
			error = mount_restrict(mount, attributes, -1);
		must(error, "make a layer read-only");
		must(mount_attach(mount, layer), "mount a layer");
		end += snprintf(end, sizeof lower - (size_t)(end - lower), "%s%s", i ? ":" : "", layer);
	}
	if (index == 0)
		places_prepare(spec, host.without & WALL_USER_NAMESPACE ? 0 : own_slot->first_id);
	snprintf(up, sizeof up, "/up/u%u", index);
	snprintf(work, sizeof work, "/up/w%u", index);
	AUTOCLOSE int overlay =
		mount_new("overlay", (const char *const(*)[2])options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	must(overlay, "create the overlay");
	snprintf(path, sizeof path, "/new/%s", tree->mountpoint);
	must(mount_attach(overlay, path), "mount the overlay");
}

static void attach(int mount, const char *path, const char *step)
{
	must(mount, step);
	must(mount_attach(mount, path), step);
	close(mount);
}

void setup_prepare(int proc)
{
	struct stat found;

	for (size_t i = 0; i < MASKS; i++)
		masks[i].needed = fstatat(proc, masks[i].path + strlen("proc/"), &found, 0) == 0 &&
				  (found.st_uid != 0 || found.st_mode & 07);
}

/* Mount what is the same in every sandbox, at /parked. mount_root() moves it to its place. */
static void mount_common(void)
{
	/* Limit the terminals: the host has a few thousand for everyone. */
	static const char *const terminals[][2] = {
		{"mode", "0620"}, {"ptmxmode", "0666"}, {"max", "64"}, {NULL, NULL}};

	must_call(chdir("/parked"), "enter /parked");
	attach(mount_new("proc", NULL, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC), "proc", "mount /proc");
	if (host.rootless)
		must_call(umount2("/proc", MNT_DETACH), "unmount the host's /proc");
	for (size_t i = 0; i < MASKS; i++)
		if (masks[i].needed)
			attach(mount_clone(AT_FDCWD, masks[i].cover, false), masks[i].path, "mask a part of /proc");
	int sys = mount_clone(AT_FDCWD, "proc/sys", false);
	must(sys, "make /proc/sys read-only");
	must(mount_restrict(sys, MOUNT_ATTR_RDONLY, -1), "make /proc/sys read-only");
	attach(sys, "proc/sys", "make /proc/sys read-only");
	attach(mount_clone(AT_FDCWD, "/dev", true), "dev", "mount /dev");
	attach(mount_new("devpts", terminals, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC), "dev/pts", "mount /dev/pts");
}

#define IOPRIO_PROCESS 1
#define IOPRIO_DEFAULT (2 << 13 | 4) /* best effort class, middle level; a smaller number is a higher priority */

/* A sandbox does not inherit a raised CPU or I/O priority of its owner, nor its protection from the OOM killer. It does
 * inherit a lowered priority. */
static void reset_priority(void)
{
	const char *file = "/parked/proc/self/oom_score_adj";
	const struct {
		int priority;
	} none = {0};
	char text[16];

	if (getpriority(PRIO_PROCESS, 0) < 0)
		must_call(setpriority(PRIO_PROCESS, 0, 0), "reset the priority");
	long policy = syscall(SYS_sched_getscheduler, 0);
	if (policy == SCHED_FIFO || policy == SCHED_RR)
		must_call(syscall(SYS_sched_setscheduler, 0, SCHED_OTHER, &none), "reset the scheduling policy");
	long io_priority = syscall(SYS_ioprio_get, IOPRIO_PROCESS, 0);
	if (io_priority > 0 && io_priority < IOPRIO_DEFAULT)
		must_call(syscall(SYS_ioprio_set, IOPRIO_PROCESS, 0, IOPRIO_DEFAULT), "reset the I/O priority");
	if (read_file(AT_FDCWD, file, text, sizeof text) <= 0 || atoi(text) >= 0)
		return;
	int error = write_file(AT_FDCWD, file, "0");
	if (error && !host.rootless) /* rootless: not writable, because we are not dumpable */
		fail("reset oom_score_adj", error);
}

static void move(const char *from, const char *to)
{
	must_call(syscall(SYS_move_mount, AT_FDCWD, from, AT_FDCWD, to, 0), "move /proc and /dev into the root");
}

static void mount_upper(void)
{
	must(mount_restrict(upper_fd, 0, idmap_userns()), "map the ids of the writable file system");
	must(mount_attach(upper_fd, "/up"), "mount the writable file system");
	close_fd(&upper_fd); /* from now on, only the overlay and the plain directories lead to it */
}

/* Shared memory is in memory, also where other files are on disk. */
static int create_shm(const struct create *spec)
{
	char size[32], inodes[32], owner[16];
	const char *options[][2] = {{"mode", "1777"}, {"size", size},   {"nr_inodes", inodes},
				    {"uid", owner},   {"gid", owner}, {NULL, NULL}};

	snprintf(size, sizeof size, "%llu", (unsigned long long)spec->shm);
	snprintf(inodes, sizeof inodes, "%llu", (unsigned long long)spec->shm / 4096 + 1024);
	snprintf(owner, sizeof owner, "%u", host.without & WALL_USER_NAMESPACE ? 0 : own_slot->first_id);
	return mount_new("tmpfs", (const char *const(*)[2])options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
}

/* Returns the places that are no overlay, as bits. */
static uint32_t mount_root(const struct create *spec)
{
	bool mapped = !(host.without & WALL_USER_NAMESPACE);

	mount_upper();
	/* overlayfs writes with the credentials of the process that mounts it, so its ids must be mapped in the
	 * sandbox. */
	must_call(prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP), "set securebits");
	setfsgid(mapped ? own_slot->first_id : 0);
	setfsuid(mapped ? own_slot->first_id : 0);
	for (uint32_t i = 0; i < spec->trees; i++)
		mount_tree(spec, i);
	must_call(chdir("/new"), "enter the new root");
	mkdir("proc", 0555);
	mkdir("dev", 0755);
	mkdir("sys", 0555);
	mkdir("workspace", 0755);
	if (mkdir("tmp", 01777) == 0)
		must_call(chmod("tmp", 01777), "set the mode of /tmp");
	setfsuid(0);
	setfsgid(0);
	uint32_t places = places_mount(spec);
	move("/parked/proc", "proc");
	move("/parked/dev", "dev");
	int shm = spec->flags & CREATE_DISK ? create_shm(spec) : mount_clone(AT_FDCWD, "/up/shm", false);
	attach(shm, "dev/shm", "mount /dev/shm");
	/* Move the new root over the launcher's and chroot, because pivot_root iterates over every process of the host.
	 * Only chroot or setns could reach the mount below, and the seccomp filter blocks both. */
	must_call(syscall(SYS_move_mount, AT_FDCWD, ".", AT_FDCWD, "/", 0), "move the new root into place");
	must_call(chroot("."), "chroot");
	must_call(chdir("/workspace"), "enter /workspace");
	umask(022);
	return places;
}

/* Without a pids cgroup, RLIMIT_NPROC limits processes per user and user namespace: one user is one sandbox. */
static void limit_processes(uint64_t count)
{
	const struct rlimit processes = {count + 2, count + 2}; /* init has two threads */

	if (count && own_slot->cgroup.v2_dir < 0 && own_slot->cgroup.tasks[CGROUP_PIDS] < 0)
		setrlimit(RLIMIT_NPROC, &processes);
}

static void drop_privileges(void)
{
	/* 1 and not 0: with 0 the kernel still pipes core dumps to a core_pattern program. */
	const struct rlimit none = {1, 1}, nothing = {0, 0};
	struct rlimit files;

	must_call(getrlimit(RLIMIT_NOFILE, &files), "limit open files");
	if (files.rlim_max > FILES)
		files.rlim_max = FILES;
	files.rlim_cur = files.rlim_max;
	must_call(setrlimit(RLIMIT_NOFILE, &files), "limit open files");
	must_call(setrlimit(RLIMIT_CORE, &none), "disable core dumps");
	/* The owner may be allowed to raise its own priority. */
	must_call(setrlimit(RLIMIT_RTPRIO, &nothing), "disable real-time priority");
	must_call(setrlimit(RLIMIT_NICE, &nothing), "disable raised priority");
	if (!(host.without & WALL_USER_NAMESPACE))
		must_call(setns(own_slot->user_namespace, CLONE_NEWUSER), "enter the user namespace");
	if (host.can_drop_groups)
		must_call(syscall(SYS_setgroups, 0, NULL), "drop groups");
	must_call(syscall(SYS_setresgid, 0, 0, 0), "set the group id");
	must_call(syscall(SYS_setresuid, 0, 0, 0), "set the user id");
	must_call(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs");
	/* Commands run as the same user: they must not ptrace init or read its /proc/1/fd. */
	must_call(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "clear the dumpable flag");
	must_call(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0), "set the parent death signal");
}

static void set_capabilities(uint32_t kept)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2] = {{kept, kept, 0}, {0, 0, 0}}, had[2];

	/* Without a user namespace of its own, init has only what the launcher has: in a container that may be less. */
	if (host.without & WALL_USER_NAMESPACE && syscall(SYS_capget, &header, had) == 0)
		data[0].effective = data[0].permitted &= had[0].permitted;
	must_call(syscall(SYS_capset, &header, data), "set capabilities");
}

/* The thread that does the work. This thread and what it starts are in the sandbox's control groups. The main thread of
 * the process is not, so the OOM killer does not choose init when the sandbox runs out of memory. */
static int work_thread(void *unused)
{
	(void)unused;
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		if (own_slot->cgroup.tasks[kind] >= 0)
			must_call(write(own_slot->cgroup.tasks[kind], "0", 1), "enter the control group");
	int payload = own_slot->cgroup.v2_dir < 0 ? -1 : dup3(own_slot->cgroup.v2_dir, PAYLOAD_FD, O_CLOEXEC);
	if (payload < 0 && !(host.without & WALL_NAMESPACES))
		must_call(unshare(CLONE_NEWCGROUP), "create a cgroup namespace");
	int first = payload < 0 ? PAYLOAD_FD : PAYLOAD_FD + 1;
	if (host.keeps) {
		must_call(syscall(SYS_close_range, first, KEEPER_FD - 1, 0), "close descriptors");
		first = KEEPER_FD + 1;
	}
	must_call(syscall(SYS_close_range, first, ~0u, 0), "close descriptors");
	priority_open(payload >= 0);
	oom_open();
	set_capabilities(INIT_CAPABILITIES);
	int listener = host.without & WALL_SECCOMP ? -EBUSY : seccomp_enter();
	must(listener == -EBUSY ? 0 : listener, "install the seccomp filter");
	broker_open(listener, activation.spec.flags & CREATE_SHARED_NETWORK);
	init_run(payload, host.keeps);
}

/* Sent before the last steps, so that the owner wakes up meanwhile. Its requests wait in the socket until set-up ends.
 * If a later step fails, FRAME_FATAL is the answer. */
static void send_ready(const struct ready *ready)
{
	struct frame header = {.size = sizeof *ready, .kind = FRAME_READY};

	send_message(control, &header, sizeof header, ready, sizeof *ready, NULL, 0);
}

/* Wait for the launcher's message. If it closes its end or dies, exit. */
static void await_activation(void)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof upper_fd + sizeof detached_fds)];
	} rights;
	struct iovec part = {&activation, sizeof activation};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = rights.space, .msg_controllen = sizeof rights.space};
	ssize_t size;

	do
		size = recvmsg(control, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC);
	while (size < 0 && errno == EINTR);
	if (size != sizeof activation)
		_exit(0);
	const struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	size_t came = head ? head->cmsg_len - CMSG_LEN(0) : 0;
	if (came != (1 + activation.detached) * sizeof(int))
		fail("receive descriptors", EMFILE);
	memcpy(&upper_fd, CMSG_DATA(head), sizeof upper_fd);
	memcpy(detached_fds, CMSG_DATA(head) + sizeof upper_fd, came - sizeof upper_fd);
}

_Noreturn void setup_run(const struct slot *slot)
{
	static struct slot handed;
	static char stack[512 << 10] __attribute__((aligned(16)));
	sigset_t all;

	control = HANDED_SOCKET;
	must(handover_receive(slot, &handed), "take over descriptors");
	own_slot = &handed;
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	prctl(PR_SET_NAME, "dutyfree-parked");
	bool namespaces = !(host.without & WALL_NAMESPACES);
	if (namespaces && handed.cgroup.v2_dir >= 0)
		must_call(setns(HANDED_GROUPS, CLONE_NEWCGROUP), "enter the cgroup namespace");
	if (namespaces)
		must_call(sethostname("sandbox", 7), "set the host name");
	mount_common();
	reset_priority();
	await_activation();
	struct ready ready = {.version = PROTOCOL_VERSION, .activated = now()};
	prctl(PR_SET_NAME, "dutyfree-init");
	title_set(activation.label);
	if (!(activation.spec.flags & CREATE_SHARED_NETWORK))
		must_call(setns(handed.netns, CLONE_NEWNET), "enter the network namespace");
	ready.places = mount_root(&activation.spec);
	ready.mounted = now();
	send_ready(&ready);
	limit_processes(activation.spec.pids);
	drop_privileges();
	must_call(dup3(HANDED_SOCKET, CONTROL_FD, O_CLOEXEC), "duplicate the socket");
	control = CONTROL_FD;
	must_call(dup3(HANDED_WEIGHT, WEIGHT_FD, O_CLOEXEC), "duplicate the CPU weight");
	must_call(dup3(HANDED_OOM, OOM_FD, O_CLOEXEC), "duplicate the OOM events");
	if (host.keeps)
		must_call(dup3(HANDED_KEEPER, KEEPER_FD, O_CLOEXEC), "duplicate the launcher's socket");
	must_call(clone(work_thread, stack + sizeof stack,
			CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM, NULL),
		  "start the work thread");
	set_capabilities(0);
	for (;;)
		pause();
}
