/* File operations that init does itself. It runs in the sandbox's root as its root user, so no path leads out. Relative
 * paths start at init's working directory.
 *
 * A symbolic link could point to /proc/self/fd, which are init's descriptors: open_no_magiclinks refuses it. */
#include "pid1/init.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define DEPTH_MAX 2048
#define LIST_PART (48u << 10) /* a worker process reads longer directories */
#define ENTRY_MAX (sizeof(struct entry) + 256)

/* The error of a failed open: ENXIO on an existing special file is ERROR_SPECIAL. */
static int open_error(const char *path, int error)
{
	struct stat found;
	bool special = error == ENXIO && stat(path, &found) == 0 && !S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode);

	return special ? -ERROR_SPECIAL : -error;
}

/* The error of a failed read or write. EIO from procfs or sysfs (such as a bad address in /proc/self/mem) is not a disk
 * error. */
int transfer_error(int fd, int error)
{
	struct statfs found;

	if (error == EIO && fstatfs(fd, &found) == 0 && (found.f_type == PROC_SUPER_MAGIC || found.f_type == SYSFS_MAGIC))
		return ERROR_SPECIAL;
	return error;
}

/* In a worker: write a file to the owner, up to its present size, even if someone keeps writing to it. */
static int read_large(const char *path, int target)
{
	static char buffer[65536];
	AUTOCLOSE int fd = open_no_magiclinks(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0, 0);
	struct stat found;
	int error = 0;

	if (fd < 0 || fstat(fd, &found) < 0)
		return fd < 0 ? fd : -errno;
	if (!S_ISREG(found.st_mode))
		return -ERROR_SPECIAL;
	for (off_t left = found.st_size < (off_t)READ_MAX ? found.st_size : (off_t)READ_MAX; !error && left > 0;) {
		ssize_t count = read(fd, buffer, left < (off_t)sizeof buffer ? (size_t)left : sizeof buffer);
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			return -transfer_error(fd, errno);
		if (count == 0)
			break;
		error = write_all(target, buffer, (size_t)count);
		left -= count;
	}
	return error;
}

int file_read(uint32_t id, const char *path)
{
	/* Non-blocking: opening a pipe would wait for its other end. */
	int fd = open_no_magiclinks(AT_FDCWD, path, O_RDONLY | O_NONBLOCK | O_NOCTTY, 0, 0);
	struct stat found;
	size_t have = 0;
	int32_t error = 0;

	if (fd < 0)
		return open_error(path, -fd);
	if (fstat(fd, &found) < 0 || !S_ISREG(found.st_mode)) {
		close(fd);
		return S_ISDIR(found.st_mode) ? -EISDIR : -ERROR_SPECIAL;
	}
	if (found.st_size > (off_t)INLINE_MAX && is_guest) {
		close(fd);
		return found.st_size > (off_t)READ_MAX ? -EFBIG : command_streamer(id, read_large, path, 0);
	}
	if (found.st_size > (off_t)INLINE_MAX) {
		outbox_frame_fd(FRAME_DONE, 0, id, &error, sizeof error, fd);
		return 0;
	}
	/* Files in /proc have size 0, so read until the end. */
	char *data = malloc(INLINE_MAX + 1);
	while (data && have <= INLINE_MAX) {
		ssize_t count = read(fd, data + have, INLINE_MAX + 1 - have);
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0 && errno != EAGAIN)
			error = transfer_error(fd, errno);
		if (count <= 0)
			break;
		have += (size_t)count;
	}
	if (!data || have > INLINE_MAX)
		error = data ? EFBIG : ENOMEM;
	close(fd);
	if (!error)
		outbox_frame(FRAME_DONE, 0, id, &error, sizeof error, data, have);
	free(data);
	return -error;
}

/* Create the parent directories. The path is unchanged afterwards. */
int make_parents(char *path)
{
	struct stat found;

	for (char *slash = *path ? strchr(path + 1, '/') : NULL; slash; slash = strchr(slash + 1, '/')) {
		*slash = 0;
		int result = mkdir(path, 0755);
		int error = result < 0 ? errno : 0;
		if (error == EEXIST && stat(path, &found) == 0 && !S_ISDIR(found.st_mode))
			error = ENOTDIR;
		*slash = '/';
		if (error && error != EEXIST)
			return -error;
	}
	return 0;
}

static int copy_data(int source, int target)
{
	char buffer[65536];

	for (;;) {
		ssize_t count = read(source, buffer, sizeof buffer);
		if (count < 0 && errno == EINTR)
			continue;
		if (count <= 0)
			return count < 0 ? -errno : 0;
		int error = write_all(target, buffer, (size_t)count);
		if (error)
			return error;
	}
}

/* The data is `size` bytes, or what `source` has if that is a descriptor. */
static int write_regular(const char *name, uint32_t mode, const char *data, size_t size, int source)
{
	int error;
	char *path = strdup(name);

	if (!path)
		return -ENOMEM;
	const int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_NOCTTY;
	AUTOCLOSE int fd = open_no_magiclinks(AT_FDCWD, path, flags, 0600, 0);
	if (fd == -ENOENT && make_parents(path) == 0)
		fd = open_no_magiclinks(AT_FDCWD, path, flags, 0600, 0);
	error = fd < 0 ? open_error(path, -fd) : 0;
	free(path);
	struct stat found;
	if (!error && (fstat(fd, &found) < 0 || !S_ISREG(found.st_mode)))
		error = -ERROR_SPECIAL;
	if (!error)
		error = -transfer_error(fd, -(source >= 0 ? copy_data(source, fd) : write_all(fd, data, size)));
	if (!error && fchmod(fd, mode & 07777) < 0)
		error = -errno;
	return error;
}

/* In a worker: the request is followed by its path. */
static int write_input(const char *request, int source)
{
	struct write head;

	memcpy(&head, request, sizeof head);
	return write_regular(request + sizeof head, head.mode, NULL, 0, source);
}

int file_write(uint32_t id, const char *payload, size_t size, int source)
{
	struct write request;

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	const char *path = payload + sizeof request;
	const char *data = memchr(path, 0, size - sizeof request);
	if (!data)
		return -EPROTO;
	data++;
	/* We fill the pipe ourselves, so a worker must read it. */
	if (is_guest && source >= 0)
		return command_worker(id, write_input, payload, source);
	int error = write_regular(path, request.mode, data, size - (size_t)(data - payload), source);
	if (error)
		return error;
	outbox_done(id, 0);
	return 0;
}

/* Append the entry of one name at `used`, and return the new size. Skips "." and "..", and names that are gone. */
static size_t put_entry(char *answer, size_t used, int directory, const char *name)
{
	struct stat about;

	if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 ||
	    fstatat(directory, name, &about, AT_SYMLINK_NOFOLLOW) < 0)
		return used;
	struct entry entry = {
		.size = (uint64_t)about.st_size, .mode = about.st_mode, .name_size = (uint32_t)strlen(name)};
	memcpy(answer + used, &entry, sizeof entry);
	memcpy(answer + used + sizeof entry, name, entry.name_size);
	return used + sizeof entry + entry.name_size;
}

static int list_all(const char *path, int fd)
{
	static char answer[LIST_PART + ENTRY_MAX];
	DIR *directory = opendir(path);
	size_t used = 0, sent = 0;
	int error = directory ? 0 : -errno;

	for (struct dirent *found; directory && !error && (found = readdir(directory));) {
		used = put_entry(answer, used, dirfd(directory), found->d_name);
		if (used > LIST_PART) {
			sent += used;
			error = sent > LISTING_MAX ? -EFBIG : write_all(fd, answer, used);
			used = 0;
		}
	}
	return error ? error : write_all(fd, answer, used);
}

int file_list(uint32_t id, const char *path)
{
	static char answer[sizeof(int32_t) + LIST_PART + ENTRY_MAX];
	int fd = open_no_magiclinks(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NONBLOCK, 0, 0);
	size_t used = sizeof(int32_t); /* room for the errno, 0 */
	struct dirent *found = NULL;

	if (fd < 0)
		return fd;
	DIR *directory = fdopendir(fd);
	if (!directory) {
		close(fd);
		return -ENOMEM;
	}
	while (used <= LIST_PART && (found = readdir(directory)))
		used = put_entry(answer, used, fd, found->d_name);
	closedir(directory);
	/* A large directory takes long: a worker lists it. */
	if (found)
		return command_streamer(id, list_all, path, 0);
	outbox_frame(FRAME_DONE, 0, id, answer, used, NULL, 0);
	return 0;
}

static int remove_below(int parent, const char *name, int depth)
{
	int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	int error = 0;

	if (fd < 0)
		return -errno;
	DIR *directory = depth < DEPTH_MAX ? fdopendir(fd) : NULL;
	if (!directory) {
		close(fd);
		return -ELOOP;
	}
	for (struct dirent *found; !error && (found = readdir(directory));) {
		if (strcmp(found->d_name, ".") == 0 || strcmp(found->d_name, "..") == 0)
			continue;
		if (unlinkat(fd, found->d_name, 0) < 0)
			error = errno == EISDIR ? remove_below(fd, found->d_name, depth + 1) : -errno;
		if (error == -ENOENT)
			error = 0; /* someone else removed it */
	}
	closedir(directory);
	if (!error && unlinkat(parent, name, AT_REMOVEDIR) < 0)
		error = -errno;
	return error;
}

int remove_tree(const char *path, int unused)
{
	(void)unused;
	return remove_below(AT_FDCWD, path, 0);
}

int file_remove(uint32_t id, const char *path)
{
	if (unlink(path) == 0) {
		outbox_done(id, 0);
		return 0;
	}
	if (errno != EISDIR)
		return -errno;
	if (rmdir(path) == 0) {
		outbox_done(id, 0);
		return 0;
	}
	/* A large tree takes long: a worker removes it. */
	return command_worker(id, remove_tree, path, -1);
}
