#include "launcher/snapshot.h"

#include "launcher/cgroup.h"
#include "launcher/cgroup_v2.h"
#include "launcher/disk.h"
#include "launcher/layers.h"
#include "launcher/overlay_merge.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

_Static_assert(MERGE_MAX == LAYERS_MAX, "all layers of a tree can be merged");

#define JOBS_MAX 64 /* more at once are refused */
#define SLACK_BYTES (1u << 20)
#define SMALL_SIZE (1u << 20)
#define SMALL_FILES 64u

static struct job {
	bool used;
	pid_t pid;
	int pidfd;
	int target;     /* the tmpfs to fill, -1 for a directory of the owner or an image */
	int channel;    /* on which the job sends the image that it has made and filled, else -1 */
	uint32_t trees; /* number of trees in it */
	uint32_t serial;
} jobs[JOBS_MAX];

static int measure(int upper, struct snapshot_usage *usage)
{
	struct statfs found;

	if (fstatfs(upper, &found) < 0)
		return -errno;
	usage->size = (uint64_t)(found.f_blocks - found.f_bfree) * (uint64_t)found.f_bsize;
	usage->files = (uint64_t)(found.f_files - found.f_ffree);
	struct snapshot_usage empty;
	if (disk_is_image(upper, &empty)) {
		usage->size -= usage->size < empty.size ? usage->size : empty.size;
		usage->files -= usage->files < empty.files ? usage->files : empty.files;
	}
	return 0;
}

/* Make a layer of each tree in a detached file system. */
static int add_layers(int *upper, uint32_t trees, struct snapshot_layers *layers)
{
	int error = measure(*upper, &layers->usage);
	bool attached = !error && !layers_clone_detached();

	/* Before Linux 6.15 only an attached mount can be cloned, and a mount is attached only once. So keep a clone. */
	if (attached)
		error = mount_attach(*upper, "/up");
	if (attached && !error) {
		close_fd(upper);
		*upper = mount_clone(AT_FDCWD, "/up", false);
	}
	for (layers->count = 0; !error && layers->count < trees; layers->count++) {
		char path[32];
		snprintf(path, sizeof path, attached ? "/up/u%u" : "u%u", layers->count);
		int layer = layer_add_mount(mount_clone(attached ? AT_FDCWD : *upper, path, false));
		if (layer < 0) {
			error = layer;
			break;
		}
		layers->number[layers->count] = (uint32_t)layer;
	}
	if (attached)
		umount2("/up", MNT_DETACH);
	if (!error)
		disk_trim(*upper);
	while (error && layers->count > 0)
		layer_remove(layers->number[--layers->count]);
	return error;
}

/* Files in /dev/shm are in no layer. A moved snapshot would lose them. */
static bool shares_memory(int upper)
{
	int fd = openat(upper, "shm", O_RDONLY | O_DIRECTORY | O_CLOEXEC), entries = 0;
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);

	while (directory && entries < 3 && readdir(directory))
		entries++;
	if (directory)
		closedir(directory);
	if (fd < 0 && errno == ENOENT) /* an image has none: /dev/shm of its sandbox lies elsewhere */
		return false;
	return entries != 2; /* besides "." and ".." */
}

/* A small snapshot is cheaper to copy: after a move, a new sandbox has to replace this one. */
static bool is_small(int upper)
{
	struct snapshot_usage usage;

	return !measure(upper, &usage) && usage.size < SMALL_SIZE && usage.files < SMALL_FILES;
}

int snapshot_move(int *upper, uint32_t trees, bool force, struct snapshot_layers *layers)
{
	return !force && (is_small(*upper) || shares_memory(*upper)) ? -EBUSY : add_layers(upper, trees, layers);
}

/* --- Copy and merge jobs ------------------------------------------------------------------------- */

/* A tmpfs just large enough for the copy. */
static int create_target(const struct snapshot_usage *usage, uint32_t trees)
{
	char size[32], inodes[32], path[16];
	const char *options[][2] = {{"mode", "0755"}, {"size", size}, {"nr_inodes", inodes}, {NULL, NULL}};

	snprintf(size, sizeof size, "%llu", (unsigned long long)usage->size + SLACK_BYTES);
	snprintf(inodes, sizeof inodes, "%llu", (unsigned long long)usage->files + 1024);
	int target = mount_new("tmpfs", (const char *const(*)[2])options, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);
	for (uint32_t i = 0; target >= 0 && i < trees; i++) {
		snprintf(path, sizeof path, "u%u", i);
		if (mkdirat(target, path, 0755) < 0)
			close_fd(&target);
	}
	return target < 0 ? -errno : target;
}

static int open_tree_of(int upper, uint32_t index)
{
	char path[16];

	snprintf(path, sizeof path, "u%u", index);
	int fd = openat(upper, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return fd < 0 ? -errno : fd;
}

/* In the child: copy each tree to the one with the same number. */
static int copy_trees(int upper, int target, uint32_t trees)
{
	for (uint32_t i = 0; i < trees; i++) {
		AUTOCLOSE int from = open_tree_of(upper, i);
		AUTOCLOSE int to = open_tree_of(target, i);
		int error = from < 0 ? from : to < 0 ? to : overlay_merge(&from, 1, 1, to, false);
		if (error)
			return error;
	}
	return 0;
}

/* Fork the child that does the copying. Returns 1 in the child, 0 in the parent, or -errno. `sends_image`: the child
 * gets a socket for the image in job->channel, and the parent the other end. */
static int start_job(struct job *job, bool sends_image)
{
	int pair[2] = {-1, -1};
	pid_t parent = getpid();

	if (sends_image && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	job->pid = fork_into(cgroup_v2_inits);
	job->channel = pair[job->pid == 0];
	close_fd(&pair[job->pid != 0]);
	if (job->pid == 0) {
		/* Charge what it writes to the memory group of all sandboxes. */
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		prctl(PR_SET_NAME, "dutyfree-copy");
		if (getppid() != parent || cgroup_join())
			_exit(EPERM);
		return 1;
	}
	int error = job->pid < 0 ? job->pid : 0;
	job->pidfd = error ? -1 : (int)syscall(SYS_pidfd_open, job->pid, 0);
	if (!error && job->pidfd < 0) {
		error = -errno;
		kill(job->pid, SIGKILL);
		waitpid(job->pid, NULL, 0);
	}
	if (error) {
		close_fd(&job->channel);
		return error;
	}
	job->used = true;
	return 0;
}

static struct job *free_job(void)
{
	for (int i = 0; i < JOBS_MAX; i++)
		if (!jobs[i].used)
			return &jobs[i];
	return NULL;
}

/* In the child of a job with an image: make it, fill it, and send it. Returns 0 or -errno. */
static int send_image(const struct job *job, int error)
{
	return error ? error : send_message(job->channel, "", 1, NULL, 0, &job->target, 1);
}

int snapshot_copy(int upper, uint32_t trees, uint64_t disk, uint32_t serial)
{
	struct snapshot_usage usage;
	struct job *job = free_job();
	int error = job ? measure(upper, &usage) : -EAGAIN;

	if (error)
		return error;
	if (disk)
		disk = disk_copy_size(disk, &usage);
	*job = (struct job){.target = disk ? -1 : create_target(&usage, trees), .trees = trees, .serial = serial};
	if (!disk && job->target < 0)
		return job->target;
	error = start_job(job, disk > 0);
	if (error > 0 && disk) {
		job->target = disk_make_now(disk);
		error = job->target < 0 ? job->target : copy_trees(upper, job->target, trees);
		_exit(-send_image(job, error));
	}
	if (error > 0)
		_exit(-copy_trees(upper, job->target, trees));
	if (error)
		close_fd(&job->target);
	return error ? error : (int)(job - jobs);
}

/* The merged size is unknown, but not above the sum of the layers, which limits the tmpfs. */
static int run_merge(struct job *job, const struct merge *spec, int target)
{
	int layers[LAYERS_MAX], error = 0;

	for (uint32_t i = 0; i < spec->count; i++) {
		layers[i] = layer_open(spec->layers[i]);
		if (layers[i] < 0)
			return layers[i];
	}
	if (spec->disk && target < 0)
		job->target = disk_make_now(spec->disk);
	if (spec->disk && target < 0 && job->target < 0)
		return job->target;
	AUTOCLOSE int to = job->target < 0 ? fcntl(target, F_DUPFD_CLOEXEC, 3) : open_tree_of(job->target, 0);
	error = to < 0 ? to : overlay_merge(layers, (int)spec->count, (int)spec->own, to, job->target < 0);
	return job->channel < 0 ? error : send_image(job, error);
}

int snapshot_merge(const struct merge *spec, int target, uint32_t serial)
{
	struct snapshot_usage most = {.size = 0, .files = 0}, one;
	struct job *job = free_job();
	int error = job ? 0 : -EAGAIN;

	for (uint32_t i = 0; !error && i < spec->own; i++) {
		AUTOCLOSE int layer = layer_open(spec->layers[i]);
		error = layer < 0 ? layer : measure(layer, &one);
		most.size += one.size;
		most.files += one.files;
	}
	if (error)
		return error;
	*job = (struct job){.target = -1, .trees = target < 0, .serial = serial};
	bool in_memory = target < 0 && !spec->disk;
	if (in_memory)
		job->target = create_target(&most, 1);
	if (in_memory && job->target < 0)
		return job->target;
	error = start_job(job, target < 0 && spec->disk);
	if (error > 0)
		_exit(-run_merge(job, spec, target));
	if (error)
		close_fd(&job->target);
	return error ? error : (int)(job - jobs);
}

int snapshot_pidfd(int number)
{
	return jobs[number].pidfd;
}

int snapshot_finish(int number, struct snapshot_layers *layers, uint32_t *serial)
{
	struct job *job = &jobs[number];
	int status = 0, error = waitpid(job->pid, &status, 0) < 0 ? -errno : 0;

	if (!error)
		error = WIFEXITED(status) ? -WEXITSTATUS(status) : -EIO;
	if (!error && job->channel >= 0) {
		char byte;
		error = receive_fd(job->channel, &byte, sizeof byte, &job->target);
	}
	*serial = job->serial;
	*layers = (struct snapshot_layers){.count = 0};
	if (!error && job->target >= 0)
		error = add_layers(&job->target, job->trees, layers);
	close_fd(&job->pidfd);
	close_fd(&job->channel);
	disk_dispose(&job->target, false);
	job->used = false;
	return error;
}

void snapshot_kill_all(void)
{
	for (int i = 0; i < JOBS_MAX; i++)
		if (jobs[i].used)
			pidfd_signal(jobs[i].pidfd, SIGKILL);
}
