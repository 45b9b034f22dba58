#include "launcher/layers.h"

#include "launcher/disk.h"
#include "launcher/host.h"
#include "sys.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <unistd.h>

static int host_mntns = -1, own_mntns = -1;
static uint32_t last;
static bool clones_detached;

/* Layers that are detached mounts. Their directories under /l stay empty; sandboxes mount the layers there. */
#define BUCKETS 4096u
static struct detached_layer {
	uint32_t number;
	int mount;
	struct detached_layer *next;
} *detached[BUCKETS];

static struct detached_layer **bucket(uint32_t number)
{
	return &detached[number % BUCKETS];
}

void layer_path(char *path, uint32_t number)
{
	snprintf(path, LAYER_PATH, "/l/%u", number);
}

/* Rootless: we may not create device nodes, so bind-mount the host's. */
static int make_device(const char *path, dev_t number)
{
	char host_path[32];

	if (!host.rootless)
		return mknod(path, S_IFCHR | 0666, number) < 0 ? -1 : chmod(path, 0666);
	snprintf(host_path, sizeof host_path, "/%s", path);
	if (mknod(path, S_IFREG | 0666, 0) < 0 || mount(host_path, path, NULL, MS_BIND, NULL) < 0)
		return -1;
	AUTOCLOSE int device = (int)syscall(SYS_open_tree, AT_FDCWD, path, OPEN_TREE_CLOEXEC);
	return device < 0 || mount_restrict(device, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC, -1) < 0 ? -1 : 0;
}

static int make_devices(void)
{
	static const struct {
		const char *path;
		unsigned major, minor;
	} devices[] = {{"dev/null", 1, 3},   {"dev/zero", 1, 5},    {"dev/full", 1, 7},
		       {"dev/random", 1, 8}, {"dev/urandom", 1, 9}, {"dev/tty", 5, 0}};
	static const char *const links[][2] = {{"/proc/self/fd", "dev/fd"},
					       {"/proc/self/fd/0", "dev/stdin"},
					       {"/proc/self/fd/1", "dev/stdout"},
					       {"/proc/self/fd/2", "dev/stderr"},
					       {"pts/ptmx", "dev/ptmx"}};

	if (mkdir("dev", 0755) < 0 || mount("tmpfs", "dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k") < 0)
		return -errno;
	for (unsigned i = 0; i < sizeof devices / sizeof *devices; i++)
		if (make_device(devices[i].path, makedev(devices[i].major, devices[i].minor)) < 0)
			return -errno;
	for (unsigned i = 0; i < sizeof links / sizeof *links; i++)
		if (symlink(links[i][0], links[i][1]) < 0)
			return -errno;
	if (mkdir("dev/shm", 01777) < 0 || mkdir("dev/pts", 0755) < 0)
		return -errno;
	/* All sandboxes share this mount, so it is read-only. Devices can be written nevertheless. */
	if (mount(NULL, "dev", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC, NULL) < 0)
		return -errno;
	return 0;
}

int layers_open(int proc)
{
	static const char *const directories[] = {"l", "up", "new", "mask", "parked", "parked/proc", "parked/dev"};

	host_mntns = openat(proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
	if (host_mntns < 0 || unshare(CLONE_NEWNS) < 0 || mount("", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID, "mode=755,size=1m") < 0 || chdir("/tmp") < 0)
		return -errno;
	umask(0);
	for (unsigned i = 0; i < sizeof directories / sizeof *directories; i++)
		if (mkdir(directories[i], 0755) < 0)
			return -errno;
	/* Masks for parts of /proc: empty, and read-only. */
	if (mount("tmpfs", "mask", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=755,size=64k") < 0 ||
	    mknod("mask/file", S_IFREG | 0444, 0) < 0 || mkdir("mask/directory", 0555) < 0 ||
	    mount(NULL, "mask", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL) < 0)
		return -errno;
	int error = make_devices();
	if (error)
		return error;
	/* Rootless: to mount a new procfs, a process must still see an unmasked one. Keep the host's until then. */
	if (host.rootless && (mkdir("proc", 0555) < 0 || mount("/proc", "proc", NULL, MS_BIND | MS_REC, NULL) < 0))
		return -errno;
	/* pivot_root puts the old root on top of the new one. Unmount it, and the host's files are unreachable. */
	if (syscall(SYS_pivot_root, ".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0)
		return -errno;
	own_mntns = openat(proc, "self/ns/mnt", O_RDONLY | O_CLOEXEC);
	if (own_mntns < 0)
		return -errno;
	AUTOCLOSE int trial = mount_new("tmpfs", NULL, 0);
	AUTOCLOSE int copy = trial < 0 ? trial : mount_clone(trial, "", false);
	clones_detached = copy >= 0;
	return 0;
}

/* Attach a detached mount as the next layer. Takes the descriptor. */
static int attach_layer(int mount)
{
	char path[LAYER_PATH];
	AUTOCLOSE int held = mount;
	int error;

	if (mount < 0)
		return mount;
	layer_path(path, last + 1);
	if (mkdir(path, 0755) < 0)
		return -errno;
	error = mount_attach(held, path);
	if (error) {
		rmdir(path);
		return error;
	}
	return (int)++last;
}

int layer_add_host(const char *path)
{
	int mount;

	if (setns(host_mntns, CLONE_NEWNS) < 0)
		return -errno;
	mount = mount_clone(AT_FDCWD, path, false);
	if (setns(own_mntns, CLONE_NEWNS) < 0)
		_exit(70); /* never go on in the host's mount namespace */
	return attach_layer(mount);
}

bool layers_clone_detached(void)
{
	return clones_detached;
}

/* Since Linux 6.15 a detached mount can be cloned, so it need not be attached. An attached one would be copied into
 * every new mount namespace, and parked processes would have to be restarted to see it. */
int layer_add_mount(int mount)
{
	char path[LAYER_PATH];

	if (mount < 0 || !clones_detached)
		return attach_layer(mount);
	struct detached_layer *layer = malloc(sizeof *layer);
	layer_path(path, last + 1);
	if (!layer || mkdir(path, 0755) < 0) {
		int error = layer ? -errno : -ENOMEM;
		free(layer);
		close(mount);
		return error;
	}
	last++;
	*layer = (struct detached_layer){.number = last, .mount = mount, .next = *bucket(last)};
	*bucket(last) = layer;
	return (int)last;
}

static struct detached_layer **find_detached(uint32_t number)
{
	struct detached_layer **at = bucket(number);

	while (*at && (*at)->number != number)
		at = &(*at)->next;
	return at;
}

int layer_detached_fd(uint32_t number)
{
	struct detached_layer *layer = *find_detached(number);

	return layer ? layer->mount : -1;
}

int layer_open(uint32_t number)
{
	char path[LAYER_PATH];
	int mount = layer_detached_fd(number);

	layer_path(path, number);
	int fd = openat(mount >= 0 ? mount : AT_FDCWD, mount >= 0 ? "." : path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

int layer_add_scratch(int *directory)
{
	static const char *const options[][2] = {{"mode", "0755"}, {NULL, NULL}};
	char path[LAYER_PATH];
	int number = attach_layer(mount_new("tmpfs", options, 0));

	if (number < 0)
		return number;
	layer_path(path, (uint32_t)number);
	*directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (*directory < 0) {
		number = -errno;
		layer_remove(last);
	}
	return number;
}

/* Locks of layers on disk. While one is held, no process removes the layer from the disk, also if the owner is gone. */
static struct layer_lock {
	uint32_t number;
	int fd;
	struct layer_lock *next;
} *locks[BUCKETS];

int layer_hold(uint32_t number, int lock)
{
	struct layer_lock *held = malloc(sizeof *held);

	if (!held)
		return -ENOMEM;
	*held = (struct layer_lock){.number = number, .fd = fcntl(lock, F_DUPFD_CLOEXEC, 3), .next = locks[number % BUCKETS]};
	if (held->fd < 0) {
		int error = -errno;
		free(held);
		return error;
	}
	locks[number % BUCKETS] = held;
	return 0;
}

static void release_lock(uint32_t number)
{
	for (struct layer_lock **at = &locks[number % BUCKETS]; *at; at = &(*at)->next) {
		struct layer_lock *held = *at;
		if (held->number != number)
			continue;
		*at = held->next;
		close(held->fd);
		free(held);
		return;
	}
}

void layers_remove_others(const uint32_t *kept, size_t count)
{
	for (uint32_t number = 1; number <= last; number++) {
		size_t i = 0;
		while (i < count && kept[i] != number)
			i++;
		if (i == count)
			layer_remove(number);
	}
}

int layer_remove(uint32_t number)
{
	char path[LAYER_PATH];

	release_lock(number);
	/* Sandboxes that use it have their own clone of the mount. */
	layer_path(path, number);
	struct detached_layer **at = find_detached(number), *layer = *at;
	if (layer) {
		*at = layer->next;
		disk_dispose(&layer->mount, false);
		free(layer);
		return rmdir(path) < 0 ? -errno : 0;
	}
	/* The last mount of an image waits for the disk when it goes. Do not wait here. */
	int last_use = disk_in_use() ? mount_clone(AT_FDCWD, path, false) : -1;
	int error = umount2(path, MNT_DETACH) < 0 || rmdir(path) < 0 ? -errno : 0;
	disk_dispose(&last_use, false);
	return error;
}
