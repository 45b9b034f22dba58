#include "launcher/disk.h"

#include "launcher/cgroup.h"
#include "launcher/cgroup_v2.h"
#include "launcher/sandboxes.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/loop.h>
#include <linux/magic.h>
#include <linux/mount.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#define READY_MAX 64u
#define KEPT_FREE 20u /* leave this part of the disk to others: 5 % */
#define ORDERS_MAX 8u /* to the helper at once: its replies always fit into the socket */
#define LOOP_CONTROL makedev(10, 237)
#define LOOP_MAJOR 7u
#define LOOP_TRIES 64

static struct template {
	struct template *next;
	uint64_t size;
	int image;
	int ready[READY_MAX];
	unsigned ready_count, orders, waiting;
	uint32_t serial; /* of the TEMPLATE request, until the first image is made */
} *templates, *current; /* `current`: used last */

static int directory = -1, maker = -1, disposer = -1;
static int disposed = -1; /* an eventfd: how many the disposer has finished. It never blocks, as a socket could */
static unsigned ready_target, orders;
static struct snapshot_usage empty_usage; /* what an empty image counts as used */
static bool ready_failed;  /* the last image that no request waited for */
static unsigned disposals; /* that the disposer has not finished */
static bool starved;       /* the disk was full: wait until the disposer has freed space */

/* What waits for room in the disposer's socket, the first one first. A slow disk must not block the launcher. */
static struct disposal {
	struct disposal *next;
	int mount, kind;
} *queued, **queued_end = &queued;

/* --- Make an image ------------------------------------------------------------------------------- */

static const char *const steps[] = {
	"cannot create a file for its writable file system",
	"cannot reserve the disk space of its limit",
	"cannot copy an empty file system",
	"cannot attach a loop device",
	"cannot mount its writable file system",
};

enum step { STEP_FILE, STEP_RESERVE, STEP_COPY, STEP_LOOP, STEP_MOUNT };

struct made {
	int32_t error;
	uint32_t step;
	uint64_t size;
	struct snapshot_usage empty;
};

/* The template is sparse: it has data only where the file system keeps its own tables. */
static int copy_template(int from, int to)
{
	static char buffer[256 << 10];

	for (off_t at = 0, end; (at = lseek(from, at, SEEK_DATA)) >= 0;)
		for (end = lseek(from, at, SEEK_HOLE); at < end;) {
			size_t most = end - at < (off_t)sizeof buffer ? (size_t)(end - at) : sizeof buffer;
			errno = EIO; /* for a short read or write, which sets no error */
			ssize_t count = pread(from, buffer, most, at);
			if (count <= 0 || pwrite(to, buffer, (size_t)count, at) != count)
				return -errno;
			at += count;
		}
	return errno == ENXIO ? 0 : -errno;
}

/* The launcher's root has no devices of the host. Make a node for a moment. */
static int open_device(mode_t kind, dev_t number)
{
	char path[32];

	snprintf(path, sizeof path, "/device-%d", (int)getpid());
	if (mknod(path, kind | 0600, number) < 0)
		return -errno;
	int fd = open(path, O_RDWR | O_CLOEXEC);
	int error = -errno;
	unlink(path);
	return fd < 0 ? error : fd;
}

static int attach_loop(int image, dev_t *number)
{
	struct loop_config config = {.fd = (uint32_t)image,
				     .block_size = 4096,
				     .info = {.lo_flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO}};
	AUTOCLOSE int control = open_device(S_IFCHR, LOOP_CONTROL);

	if (control < 0)
		return control;
	for (int i = 0; i < LOOP_TRIES; i++) {
		int free = ioctl(control, LOOP_CTL_GET_FREE);
		if (free < 0)
			return -errno;
		*number = makedev(LOOP_MAJOR, (unsigned)free);
		AUTOCLOSE int device = open_device(S_IFBLK, *number);
		if (device < 0)
			return device;
		if (ioctl(device, LOOP_CONFIGURE, &config) == 0)
			return fcntl(device, F_DUPFD_CLOEXEC, 3);
		if (errno != EBUSY) /* another process was faster */
			return -errno;
	}
	return -EBUSY;
}

static int mount_image(dev_t number)
{
	char path[32], name[16];
	/* Nothing in it outlives the machine: no barriers, no order of data and journal, a late commit. No table need be
	 * written first: the file is all zeros. */
	const char *options[][2] = {{"source", path},      {"noinit_itable", NULL},   {"nobarrier", NULL},
				    {"commit", "600"}, {"data", "writeback"}, {"nodiscard", NULL},
				    {NULL, NULL}};

	snprintf(path, sizeof path, "/device-%d", (int)getpid());
	if (mknod(path, S_IFBLK | 0600, number) < 0)
		return -errno;
	int mount = mount_new("ext4", options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	unlink(path);
	for (unsigned i = 0; mount >= 0 && i < TREES_MAX; i++) {
		snprintf(name, sizeof name, "u%u", i);
		int error = mkdirat(mount, name, 0755);
		name[0] = 'w';
		if (error < 0 || mkdirat(mount, name, 0755) < 0) {
			error = -errno;
			close(mount);
			return error;
		}
	}
	return mount;
}

static int measure(int mount, struct snapshot_usage *usage)
{
	struct statfs found;

	if (fstatfs(mount, &found) < 0)
		return -errno;
	usage->size = (uint64_t)(found.f_blocks - found.f_bfree) * (uint64_t)found.f_bsize;
	usage->files = (uint64_t)(found.f_files - found.f_ffree);
	return 0;
}

/* Free the blocks that it does not use. For layers: nothing writes to them any more. */
static void trim(int mount)
{
	struct fstrim_range all = {.len = ~0ull};
	AUTOCLOSE int root = openat(mount, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (root >= 0)
		ioctl(root, FITRIM, &all);
}

static int make_image(int template, struct made *made)
{
	struct stat found;
	struct statfs host_disk;
	dev_t number = 0;

	made->step = STEP_FILE;
	AUTOCLOSE int image = openat(directory, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (image < 0 || fstat(template, &found) < 0)
		return -errno;
	made->step = STEP_RESERVE;
	if (fstatfs(image, &host_disk) < 0)
		return -errno;
	uint64_t kept = (uint64_t)host_disk.f_blocks / KEPT_FREE;
	if (((uint64_t)host_disk.f_bavail - kept) * (uint64_t)host_disk.f_bsize < (uint64_t)found.st_size ||
	    (uint64_t)host_disk.f_bavail < kept)
		return -ENOSPC;
	if (fallocate(image, 0, 0, found.st_size) < 0)
		return -errno;
	made->step = STEP_COPY;
	int error = copy_template(template, image);
	if (error)
		return error;
	made->step = STEP_LOOP;
	AUTOCLOSE int device = attach_loop(image, &number);
	if (device < 0)
		return device;
	made->step = STEP_MOUNT;
	int mount = mount_image(number);
	if (mount >= 0)
		measure(mount, &made->empty);
	return mount;
}

static struct template *find_template(uint64_t size)
{
	struct template *template = templates;

	while (template && template->size != size)
		template = template->next;
	return template;
}

int disk_make_now(uint64_t size)
{
	struct template *template = find_template(size);
	struct made made;

	return template ? make_image(template->image, &made) : -ENOENT;
}

uint64_t disk_copy_size(uint64_t most, const struct snapshot_usage *usage)
{
	uint64_t best = most;

	for (struct template *template = templates; template; template = template->next)
		if (template->size < best && template->size / 2 >= usage->size && template->size / 16384 >= usage->files)
			best = template->size;
	return best;
}

/* --- Helper processes ---------------------------------------------------------------------------- */

enum { ORDER_UNMOUNT, ORDER_REMOVE, ORDER_TRIM };

/* To a helper, with a template or a mount. */
struct order {
	uint64_t size; /* of the image to make; 0: unmount */
	int kind;
};

#define REMOVE_DEPTH 64 /* a sandbox can nest directories without end; those below this depth are written and unmounted */

/* Removed files are not written to disk any more, which the unmount would do. */
static void remove_files(int parent, const char *name, int depth)
{
	int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	DIR *entries = fd < 0 ? NULL : fdopendir(fd);

	if (!entries) {
		close_at(&fd);
		return;
	}
	for (struct dirent *entry; (entry = readdir(entries));) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (unlinkat(fd, entry->d_name, 0) < 0 && errno == EISDIR && depth < REMOVE_DEPTH)
			remove_files(fd, entry->d_name, depth + 1);
	}
	closedir(entries);
}

static _Noreturn void run_helper(int socket)
{
	struct order order;

	for (int fd; receive_fd(socket, &order, sizeof order, &fd) == 0; close_fd(&fd)) {
		struct made made = {.size = order.size};
		if (!order.size) {
			if (order.kind == ORDER_REMOVE)
				remove_files(fd, ".", 0);
			else if (order.kind == ORDER_TRIM)
				trim(fd);
			close_fd(&fd);
			eventfd_write(disposed, 1);
			continue;
		}
		AUTOCLOSE int mount = make_image(fd, &made);
		made.error = mount < 0 ? mount : 0;
		if (send_message(socket, &made, sizeof made, NULL, 0, &mount, mount >= 0))
			break;
	}
	_exit(0);
}

static int start_helper(const char *name)
{
	int pair[2];
	pid_t parent = getpid();

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	pid_t pid = fork_into(cgroup_v2_inits);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		prctl(PR_SET_NAME, name);
		if (getppid() != parent || cgroup_join())
			_exit(1);
		/* Keep nothing else open: another sandbox's files could not go. */
		dup2(pair[1], 3);
		dup2(directory, 4);
		dup2(disposed, 5);
		directory = 4;
		disposed = 5;
		syscall(SYS_close_range, 6, ~0u, 0);
		run_helper(3);
	}
	close(pair[1]);
	if (pid < 0)
		close(pair[0]);
	return pid < 0 ? pid : pair[0];
}

/* --- In the launcher ----------------------------------------------------------------------------- */

int disk_open(int fd)
{
	if (directory >= 0) {
		close(fd);
		return -EEXIST;
	}
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = DISPOSED_EVENT};
	disposed = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (disposed < 0 || epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, disposed, &event) < 0) {
		int error = -errno;
		close_fd(&disposed);
		close(fd);
		return error;
	}
	directory = fd;
	return 0;
}

static void remove_template(struct template *gone)
{
	struct template **at = &templates;

	while (*at != gone)
		at = &(*at)->next;
	*at = gone->next;
	if (current == gone)
		current = templates;
	close(gone->image);
	free(gone);
}

static int send_order(struct template *template);

void disk_add_template(int image, uint64_t size, uint32_t serial)
{
	struct template *template = directory < 0 || !size || find_template(size) ? NULL : calloc(1, sizeof *template);

	if (!template) {
		close(image);
		if (directory >= 0 && size && find_template(size)) /* of a former owner */
			reply(serial, 0, 0, NULL, 0, NULL, 0);
		else
			refuse(serial, -EPROTO, "malformed request");
		return;
	}
	*template = (struct template){.next = templates, .size = size, .image = image, .serial = serial};
	templates = template;
	if (!current)
		current = template;
	int error = send_order(template);
	if (error) {
		refuse(serial, error, "cannot start the process that makes file systems");
		remove_template(template);
	}
}

bool disk_in_use(void)
{
	return directory >= 0;
}

bool disk_has_template(uint64_t size)
{
	return find_template(size) != NULL;
}

/* Forget a maker that has died, and its orders. */
static void lose_maker(void)
{
	epoll_ctl(launcher_epoll, EPOLL_CTL_DEL, maker, NULL);
	close_fd(&maker);
	orders = 0;
	for (struct template *template = templates; template; template = template->next)
		template->orders = 0;
}

static int send_order(struct template *template)
{
	const struct order order = {.size = template->size};

	if (maker < 0) {
		struct epoll_event event = {.events = EPOLLIN, .data.u64 = DISK_EVENT};
		maker = start_helper("dutyfree-disk");
		if (maker < 0)
			return maker;
		epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, maker, &event);
	}
	int error = send_message(maker, &order, sizeof order, NULL, 0, &template->image, 1);
	if (error) {
		lose_maker();
		return error;
	}
	template->orders++;
	orders++;
	return 0;
}

static int order_missing(struct template *template, unsigned target)
{
	int error = 0;

	while (!error && orders < ORDERS_MAX && template->ready_count + template->orders < target)
		error = send_order(template);
	return error;
}

void disk_set_ready(unsigned target)
{
	ready_target = target < READY_MAX ? target : READY_MAX;
}

bool disk_lacks_ready(void)
{
	return current && !ready_failed && current->ready_count + current->orders < ready_target;
}

void disk_prepare(void)
{
	for (struct template *template = templates; template; template = template->next)
		if (template->waiting)
			order_missing(template, template->waiting);
	if (disk_lacks_ready())
		order_missing(current, ready_target);
}

int disk_take(uint64_t size)
{
	struct template *template = find_template(size);

	if (!template)
		return -ENOENT;
	/* Do not keep images that reserve space and that nobody may want. */
	if (template != current && current)
		while (current->ready_count > 0)
			disk_dispose(&current->ready[--current->ready_count], true);
	current = template;
	ready_failed = false;
	if (template->ready_count > 0) {
		int mount = template->ready[--template->ready_count];
		return mount;
	}
	int error = order_missing(template, template->waiting + 1);
	if (error)
		return error;
	template->waiting++;
	return -EAGAIN;
}

void disk_replied(void)
{
	struct made made;
	int mount;

	if (receive_fd(maker, &made, sizeof made, &mount)) {
		static const char died[] = "the process that makes file systems has died";
		lose_maker();
		close_fd(&mount);
		for (struct template *template = templates, *next; template; template = next) {
			next = template->next;
			for (; template->waiting; template->waiting--)
				sandbox_disk_made(template->size, -EPIPE, died);
			if (template->serial) {
				refuse(template->serial, -EPIPE, died);
				remove_template(template);
			}
		}
		return;
	}
	struct template *template = find_template(made.size);
	if (!template) {
		close_fd(&mount);
		return;
	}
	if (template->serial && !made.error) {
		reply(template->serial, 0, 0, NULL, 0, NULL, 0);
		template->serial = 0;
	}
	template->orders -= template->orders > 0;
	orders -= orders > 0;
	if (mount >= 0) {
		empty_usage = made.empty;
		if (template->ready_count < READY_MAX)
			template->ready[template->ready_count++] = mount;
		else
			disk_dispose(&mount, true);
	}
	if (template->waiting && made.error == -ENOSPC && disposals > 0) {
		starved = true;
		return;
	}
	if (template->waiting) {
		template->waiting--;
		sandbox_disk_made(made.size, made.error, steps[made.step]);
	} else if (made.error) {
		ready_failed = true; /* the next request tries again, and reports the error */
	}
	if (template->serial) {
		refuse(template->serial, made.error, steps[made.step]);
		remove_template(template);
	}
	disk_prepare();
}

bool disk_is_image(int mount, struct snapshot_usage *empty)
{
	struct statfs found;
	bool is = directory >= 0 && fstatfs(mount, &found) == 0 && found.f_type == EXT4_SUPER_MAGIC;

	*empty = is ? empty_usage : (struct snapshot_usage){0, 0};
	return is;
}

static void watch_disposer(int operation, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.u64 = DISPOSER_EVENT};

	epoll_ctl(launcher_epoll, operation, disposer, &event);
}

/* It has died, and the kernel unmounts what it had. */
static void lose_disposer(void)
{
	watch_disposer(EPOLL_CTL_DEL, 0);
	close_fd(&disposer);
	disposals = 0;
	if (starved) {
		starved = false;
		disk_prepare();
	}
}

/* 0, -EAGAIN if it must wait, or -errno: then the caller closes the mount, and the kernel writes and unmounts. */
static int try_disposer(int kind, int mount)
{
	const struct order order = {.kind = kind};

	if (disposer < 0) {
		disposer = start_helper("dutyfree-umount");
		if (disposer < 0)
			return disposer;
		/* A few are enough there. More wait here, where a descriptor in transit counts for nobody. */
		setsockopt(disposer, SOL_SOCKET, SO_SNDBUF, &(int){1}, sizeof(int));
		watch_disposer(EPOLL_CTL_ADD, EPOLLIN);
	}
	int error = send_message_now(disposer, &order, sizeof order, mount);
	if (!error)
		disposals++;
	else if (error != -EAGAIN)
		lose_disposer();
	return error;
}

static int queue_disposal(int kind, int mount)
{
	struct disposal *disposal = malloc(sizeof *disposal);
	int own = disposal ? fcntl(mount, F_DUPFD_CLOEXEC, 3) : -1;

	if (own < 0) {
		free(disposal);
		return -ENOMEM;
	}
	*disposal = (struct disposal){.mount = own, .kind = kind};
	*queued_end = disposal;
	queued_end = &disposal->next;
	watch_disposer(EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
	return 0;
}

static void send_to_disposer(int kind, int mount)
{
	if (queued || try_disposer(kind, mount) == -EAGAIN)
		queue_disposal(kind, mount);
}

void disk_send_disposals(void)
{
	char nothing;

	/* It never writes: what can be read is its end. */
	if (disposer >= 0 && recv(disposer, &nothing, sizeof nothing, MSG_DONTWAIT) == 0)
		lose_disposer();
	for (struct disposal *first; (first = queued); free(first)) {
		if (try_disposer(first->kind, first->mount) == -EAGAIN)
			return;
		queued = first->next;
		if (!queued)
			queued_end = &queued;
		close(first->mount);
	}
	if (disposer >= 0)
		watch_disposer(EPOLL_CTL_MOD, EPOLLIN);
}

void disk_disposed(void)
{
	eventfd_t count = 0;

	eventfd_read(disposed, &count);
	disposals -= count < disposals ? (unsigned)count : disposals;
	if (starved) {
		starved = false;
		disk_prepare();
	}
}

void disk_dispose(int *mount, bool unused)
{
	struct snapshot_usage empty;

	if (*mount >= 0 && disk_is_image(*mount, &empty))
		send_to_disposer(unused ? ORDER_REMOVE : ORDER_UNMOUNT, *mount);
	close_fd(mount);
}

void disk_dispose_overlay(int *overlay)
{
	if (*overlay >= 0)
		send_to_disposer(ORDER_UNMOUNT, *overlay);
	close_fd(overlay);
}

void disk_trim(int mount)
{
	struct snapshot_usage empty;

	if (disk_is_image(mount, &empty))
		send_to_disposer(ORDER_TRIM, mount);
}

void disk_close(void)
{
	for (struct template *template = templates; template; template = template->next)
		while (template->ready_count > 0)
			disk_dispose(&template->ready[--template->ready_count], true);
	close_fd(&maker);
	for (struct disposal *last = queued; last; last = last->next) {
		const struct order order = {.kind = last->kind};
		if (disposer >= 0) /* nothing else is left to do, so wait for room */
			send_message(disposer, &order, sizeof order, NULL, 0, &last->mount, 1);
		close(last->mount);
	}
	close_fd(&disposer); /* it ends when it has unmounted everything */
}
