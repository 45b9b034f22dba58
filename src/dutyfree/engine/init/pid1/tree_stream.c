/* Tree streams: copy a directory tree in or out as a sequence of struct member (protocol.h), in a worker process. */
#include "pid1/init.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHUNK (128u << 10)
#define DEPTH_MAX 512

static int read_all(int fd, void *data, size_t size)
{
	for (size_t have = 0; have < size;) {
		ssize_t count = read(fd, (char *)data + have, size - have);
		if (count < 0 && errno == EINTR)
			continue;
		if (count <= 0)
			return count < 0 ? -errno : -EPIPE;
		have += (size_t)count;
	}
	return 0;
}

static int unpack_file(int fd, const char *path, const struct member *member, char *buffer)
{
	struct stat found;
	/* Replace what is not a regular file; do not write through it. */
	if (lstat(path, &found) == 0 && !S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode))
		unlink(path);
	/* Non-blocking: someone may put a pipe there now. */
	AUTOCLOSE int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0600);
	int error = file >= 0 ? 0 : errno == ENXIO ? -ERROR_SPECIAL : -errno;

	if (!error && (fstat(file, &found) < 0 || !S_ISREG(found.st_mode)))
		error = -ERROR_SPECIAL;

	for (uint64_t left = member->size; !error && left > 0;) {
		size_t part = left < CHUNK ? (size_t)left : CHUNK;
		error = read_all(fd, buffer, part);
		if (!error)
			error = -transfer_error(file, -write_all(file, buffer, part));
		left -= part;
	}
	if (!error && fchmod(file, member->mode & 07777) < 0)
		error = -errno;
	return error;
}

static int unpack_member(int fd, const char *path, const struct member *member, char *buffer)
{
	int error;

	if (S_ISREG(member->mode))
		return unpack_file(fd, path, member, buffer);
	if (S_ISDIR(member->mode)) {
		struct stat found;
		if (mkdir(path, 0755) < 0 &&
		    (errno != EEXIST || stat(path, &found) < 0 || !S_ISDIR(found.st_mode)))
			return errno == EEXIST ? -ENOTDIR : -errno;
		return chmod(path, member->mode & 07777) < 0 ? -errno : 0;
	}
	if (!S_ISLNK(member->mode) || member->size >= PATH_MAX)
		return -EPROTO;
	error = read_all(fd, buffer, (size_t)member->size);
	buffer[member->size] = 0;
	if (!error && symlink(buffer, path) < 0) {
		/* Replace what is there. */
		error = errno == EEXIST && unlink(path) == 0 && symlink(buffer, path) == 0 ? 0 : -errno;
	}
	return error;
}

int tree_unpack(const char *path, int fd)
{
	static char buffer[CHUNK], full[2 * PATH_MAX];
	size_t root = strlen(path);
	struct member member;
	int error;

	if (root >= PATH_MAX)
		return -ENAMETOOLONG;
	memcpy(full, path, root + 1);
	error = make_parents(full);
	while (!error && (error = read_all(fd, &member, sizeof member)) == 0 && member.mode) {
		if (member.path_size >= PATH_MAX)
			return -ENAMETOOLONG;
		full[root] = member.path_size ? '/' : 0;
		error = read_all(fd, full + root + 1, member.path_size);
		full[root + 1 + member.path_size] = 0;
		if (!error)
			error = unpack_member(fd, full, &member, buffer);
	}
	return error;
}

static int write_header(int fd, const struct member *member, const char *path)
{
	int error = write_all(fd, member, sizeof *member);

	return error ? error : write_all(fd, path, member->path_size);
}

static int pack_file(int fd, int file, struct member *member, const char *path)
{
	static char buffer[CHUNK];
	int error = write_header(fd, member, path);

	for (uint64_t left = member->size; !error && left > 0;) {
		ssize_t count = read(file, buffer, left < CHUNK ? (size_t)left : CHUNK);
		if (count < 0)
			return -errno;
		if (count == 0) { /* the file was truncated meanwhile: pad with zeros */
			count = (ssize_t)(left < CHUNK ? left : CHUNK);
			memset(buffer, 0, (size_t)count);
		}
		error = write_all(fd, buffer, (size_t)count);
		left -= (uint64_t)count;
	}
	return error;
}

/* `path`: the member's path of length `size`, in a buffer of PATH_MAX. */
static int pack_member(int fd, int parent, const char *name, char *path, size_t size, int depth)
{
	struct stat found;
	int error = 0;

	if (fstatat(parent, name, &found, AT_SYMLINK_NOFOLLOW) < 0)
		return depth ? 0 : -errno; /* removed meanwhile */
	struct member member = {.mode = found.st_mode, .path_size = (uint32_t)size};
	if (S_ISLNK(found.st_mode)) {
		static char target[PATH_MAX]; /* static: the recursion may be deep */
		ssize_t length = readlinkat(parent, name, target, sizeof target);
		if (length < 0)
			return -errno;
		member.size = (uint64_t)length;
		error = write_header(fd, &member, path);
		return error ? error : write_all(fd, target, (size_t)length);
	}
	if (!S_ISREG(found.st_mode) && !S_ISDIR(found.st_mode))
		return depth ? 0 : -ERROR_SPECIAL;
	int file = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (file < 0)
		return -errno;
	if (S_ISREG(found.st_mode)) {
		member.size = (uint64_t)found.st_size;
		error = pack_file(fd, file, &member, path);
		close(file);
		return error;
	}
	error = write_header(fd, &member, path);
	DIR *directory = depth < DEPTH_MAX ? fdopendir(file) : NULL;
	if (!directory) {
		close(file);
		return -ELOOP;
	}
	for (struct dirent *entry; !error && (entry = readdir(directory));) {
		size_t length = strlen(entry->d_name);
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		if (size + length + 2 > PATH_MAX) {
			error = -ENAMETOOLONG;
			break;
		}
		size_t at = size;
		if (size)
			path[at++] = '/';
		memcpy(path + at, entry->d_name, length + 1);
		error = pack_member(fd, file, entry->d_name, path, at + length, depth + 1);
		path[size] = 0;
	}
	closedir(directory);
	return error;
}

int tree_pack(const char *path, int fd)
{
	static char name[PATH_MAX];
	const struct member end = {0};
	int error = pack_member(fd, AT_FDCWD, path, name, 0, 0);

	return error ? error : write_all(fd, &end, sizeof end);
}
