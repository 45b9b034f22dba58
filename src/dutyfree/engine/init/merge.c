#define _GNU_SOURCE
#include "merge.h"

#include "host.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <search.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LIST (64u << 10) /* the kernel gives no more */

static int roots[MERGE_MAX], count, own, target_root;
static int depth, deepest; /* of the directory that is made */
static size_t longest;     /* path */
static const char *opaque, *redirect, *metacopy;
static void *links; /* of files with several names, the first of them */

struct link {
	int layer;
	ino_t file;
	char *path;
};

/* One name, looked up through the layers as the overlay does. */
struct found {
	int dirs[MERGE_MAX]; /* of a directory: those that it merges, -1 elsewhere */
	struct stat info;
	int layer;            /* the uppermost that has it, -1 if none does */
	int parent;           /* where it lies there, and its name */
	char leaf[NAME_MAX + 1];
	int data;             /* of a file: its contents, -1 if they are below all layers */
	bool alone;           /* of a file: without its contents, wherever they are */
	bool ends;            /* nothing below belongs to it */
	bool own_ends;        /* nothing below our own layers does */
	char below[PATH_MAX]; /* where what does is, from the root */
	char under[PATH_MAX]; /* the same below our own layers: others may lead elsewhere, as before */
};

static bool is_whiteout(const struct stat *info)
{
	return S_ISCHR(info->st_mode) && info->st_rdev == makedev(0, 0);
}

static ssize_t attribute(int fd, const char *name, char *value, size_t size)
{
	ssize_t got = fgetxattr(fd, name, value, size - 1);

	value[got < 0 ? 0 : got] = 0;
	return got;
}

static int fits(int printed)
{
	return printed < 0 || printed >= PATH_MAX ? -ENAMETOOLONG : 0;
}

/* Of a renamed directory, or a file of which only the metadata lie here: where it is below. A name alone is
 * one in the same directory. `end` is that of the part of the path that it stands for. */
static int follow(int fd, char *path, size_t end)
{
	char value[PATH_MAX], rest[PATH_MAX];

	if (attribute(fd, redirect, value, sizeof value) <= 0)
		return 0;
	snprintf(rest, sizeof rest, "%s", path + end);
	if (value[0] == '/')
		return fits(snprintf(path, PATH_MAX, "%s%s", value, rest));
	while (end > 0 && path[end - 1] != '/')
		end--;
	return strlen(value) + strlen(rest) + end < PATH_MAX ? (sprintf(path + end, "%s%s", value, rest), 0)
							      : -ENAMETOOLONG;
}

/* The directory of a path in one layer, and its last name; the path is changed to what it is below this layer.
 * A descriptor, -1 if there is none here, or an error below that. */
static int walk(int layer, char *path, char *leaf, bool *ends)
{
	char whole[PATH_MAX], value[2];
	int at = fcntl(roots[layer], F_DUPFD_CLOEXEC, 3);
	size_t begin = 1;

	snprintf(whole, sizeof whole, "%s", path);
	for (char *slash; (slash = strchr(whole + begin, '/')); begin = (size_t)(slash - whole) + 1) {
		struct stat info;
		*slash = 0;
		if (fstatat(at, whole + begin, &info, AT_SYMLINK_NOFOLLOW) < 0) {
			close(at);
			return -1;
		}
		int next = S_ISDIR(info.st_mode)
				   ? openat(at, whole + begin, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
				   : -1;
		close(at);
		at = next;
		if (at < 0) {
			*ends = true;
			return -1;
		}
		if (attribute(at, opaque, value, sizeof value) > 0)
			*ends = true;
		/* As long as nothing above was renamed, places in both are the same. */
		size_t end = strlen(path) - strlen(slash + 1) - 1;
		int error = follow(at, path, end);
		if (error) {
			close(at);
			return error - 1;
		}
		*slash = '/';
	}
	if (strlen(whole + begin) > NAME_MAX) {
		close(at);
		return -ENAMETOOLONG - 1;
	}
	strcpy(leaf, whole + begin);
	return at;
}

/* What one layer has of it: 0 or -errno. */
static int look(int layer, int parent, const char *leaf, struct found *found)
{
	struct stat info;
	char value[LIST];

	if (fstatat(parent, leaf, &info, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT ? 0 : -errno;
	bool first = found->layer < 0;
	if (!first && S_ISDIR(info.st_mode) != S_ISDIR(found->info.st_mode)) {
		found->ends = true;
		return 0;
	}
	if (first) {
		found->layer = layer;
		found->info = info;
		found->parent = fcntl(parent, F_DUPFD_CLOEXEC, 3);
		snprintf(found->leaf, sizeof found->leaf, "%s", leaf);
	}
	if (!S_ISDIR(info.st_mode) && !S_ISREG(info.st_mode)) {
		found->ends = true;
		return 0;
	}
	int fd = openat(parent, leaf, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	int error = follow(fd, found->below, strlen(found->below));
	if (S_ISDIR(info.st_mode)) {
		found->dirs[layer] = fd;
		found->ends = found->ends || attribute(fd, opaque, value, sizeof value) > 0;
		return error;
	}
	if (attribute(fd, metacopy, value, sizeof value) >= 0) {
		found->alone = true;
		close(fd);
		return error;
	}
	found->data = fd;
	found->ends = true;
	return 0;
}

static void release(struct found *found)
{
	for (int layer = 0; layer < count; layer++)
		close_fd(&found->dirs[layer]);
	close_fd(&found->parent);
	close_fd(&found->data);
}

/* By its whole path through all layers, for a rename in one changes where those below are asked. */
static int resolve_renamed(const char *path, struct found *found)
{
	char leaf[NAME_MAX + 1];
	int error = 0;

	snprintf(found->below, sizeof found->below, "%s", path);
	for (int layer = 0; layer < count && !error && !found->ends; layer++) {
		int parent = walk(layer, found->below, leaf, &found->ends);
		if (parent < -1)
			error = parent + 1;
		if (parent >= 0) {
			error = look(layer, parent, leaf, found);
			close(parent);
		}
		if (layer < own) {
			found->own_ends = found->ends;
			strcpy(found->under, found->below);
		}
	}
	return error;
}

static void clear(struct found *found)
{
	*found = (struct found){.layer = -1, .parent = -1, .data = -1};
	for (int layer = 0; layer < count; layer++)
		found->dirs[layer] = -1;
}

static int resolve(const struct found *above, const char *name, const char *path, struct found *found)
{
	char below[PATH_MAX];
	int error = fits(snprintf(below, sizeof below, "%s/%s", above->below, name));

	clear(found);
	strcpy(found->below, below);
	if (!error)
		error = fits(snprintf(found->under, sizeof found->under, "%s/%s", above->under, name));
	for (int layer = 0; layer < count && !error && !found->ends; layer++) {
		if (above->dirs[layer] >= 0)
			error = look(layer, above->dirs[layer], name, found);
		if (layer < own)
			found->own_ends = found->ends;
		if (!error && strcmp(below, found->below) != 0) {
			release(found);
			clear(found);
			return resolve_renamed(path, found);
		}
	}
	found->ends = found->ends || above->ends;
	found->own_ends = found->own_ends || above->own_ends;
	return error;
}

/* --- What is made of it ----------------------------------------------------------------------------- */

static int copy_attributes(int from, int to)
{
	static char names[LIST], value[LIST];
	ssize_t size = flistxattr(from, names, sizeof names);

	for (ssize_t at = 0; at < size; at += (ssize_t)strlen(names + at) + 1) {
		const char *name = names + at;
		/* Nobody in a sandbox can have set such: but if one did, it would lead through the layers. */
		if (!strncmp(name, "trusted.", 8) || !strncmp(name, "user.overlay.", 13))
			continue;
		ssize_t length = fgetxattr(from, name, value, sizeof value);
		if (length >= 0 && fsetxattr(to, name, value, (size_t)length, 0) < 0 && errno == ENOSPC)
			return -ENOSPC;
	}
	return 0;
}

static int mark(int fd, const char *name, const char *value)
{
	return fsetxattr(fd, name, value, strlen(value), 0) < 0 ? -errno : 0;
}

static int dress(int from, int to, const struct stat *info)
{
	const struct timespec times[2] = {info->st_atim, info->st_mtim};

	if (fchown(to, info->st_uid, info->st_gid) < 0 || fchmod(to, info->st_mode & 07777) < 0)
		return -errno;
	int error = copy_attributes(from, to);
	return error ? error : futimens(to, times) < 0 ? -errno : 0;
}

/* Holes stay holes: a few bytes can claim to be any size. */
static int copy_data(int from, int to, off_t size)
{
	if (ftruncate(to, size) < 0)
		return -errno;
	for (off_t at = 0; at < size;) {
		at = lseek(from, at, SEEK_DATA);
		off_t end = at < 0 ? -1 : lseek(from, at, SEEK_HOLE);
		if (at < 0 && errno == ENXIO)
			return 0;
		if (end < 0 || lseek(to, at, SEEK_SET) < 0)
			return -errno;
		while (at < end) {
			ssize_t sent = sendfile(to, from, &at, (size_t)(end - at));
			if (sent < 0 && errno != EINTR)
				return -errno;
			if (sent == 0)
				return 0;
		}
	}
	return 0;
}

static int by_file(const void *a, const void *b)
{
	const struct link *one = a, *other = b;

	if (one->layer != other->layer)
		return one->layer < other->layer ? -1 : 1;
	return one->file < other->file ? -1 : one->file > other->file;
}

/* Whether the file is there already under another name, and has this one now: 1, 0 or -errno. */
static int linked(const struct found *found, int target, const char *name, const char *path)
{
	struct link *link = malloc(sizeof *link);

	if (!link)
		return -ENOMEM;
	*link = (struct link){found->layer, found->info.st_ino, NULL};
	struct link **known = tsearch(link, &links, by_file);
	if (known && *known != link) {
		free(link);
		return linkat(target_root, (*known)->path, target, name, 0) < 0 ? -errno : 1;
	}
	link->path = strdup(path + 1);
	return known && link->path ? 0 : -ENOMEM;
}

static int make_file(const struct found *found, int target, const char *name, const char *path)
{
	char value[LIST];
	int error = found->info.st_nlink > 1 ? linked(found, target, name, path) : 0;

	if (error)
		return error < 0 ? error : 0;
	AUTOCLOSE int from = openat(found->parent, found->leaf, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	AUTOCLOSE int to = openat(target, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (from < 0 || to < 0)
		return -errno;
	if (found->data >= 0) {
		error = copy_data(found->data, to, found->info.st_size);
	} else {
		/* Only the metadata are in these layers: the rest stays where it is. */
		ssize_t size = attribute(from, metacopy, value, sizeof value);
		if (ftruncate(to, found->info.st_size) < 0 || size < 0 ||
		    fsetxattr(to, metacopy, value, (size_t)size, 0) < 0)
			return -errno;
		if (strcmp(found->under, path) != 0)
			error = mark(to, redirect, found->under);
	}
	return error ? error : dress(from, to, &found->info);
}

static int make_other(const struct found *found, int target, const char *name)
{
	char value[PATH_MAX];
	const struct stat *info = &found->info;
	const struct timespec times[2] = {info->st_atim, info->st_mtim};

	if (S_ISLNK(info->st_mode)) {
		ssize_t size = readlinkat(found->parent, found->leaf, value, sizeof value - 1);
		value[size < 0 ? 0 : size] = 0;
		if (size < 0 || symlinkat(value, target, name) < 0)
			return -errno;
	} else if (is_whiteout(info) || S_ISFIFO(info->st_mode) || S_ISSOCK(info->st_mode)) {
		if (mknodat(target, name, info->st_mode, 0) < 0)
			return -errno;
	} else {
		return 0; /* no device can be made in a sandbox */
	}
	if (fchownat(target, name, info->st_uid, info->st_gid, AT_SYMLINK_NOFOLLOW) < 0 ||
	    utimensat(target, name, times, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	return 0;
}

static int make_directory(const struct found *found, int target, char *path, bool whole);

static int make(const struct found *above, int target, const char *name, char *path, bool whole)
{
	struct found *found = malloc(sizeof *found);
	size_t length = strlen(path);
	int error = !found ? -ENOMEM : length + 1 + strlen(name) < longest && depth < deepest ? 0 : -ENAMETOOLONG;

	depth++;
	if (found)
		clear(found);
	if (!error) {
		sprintf(path + length, "/%s", name);
		error = resolve(above, name, path, found);
	}
	/* Where nothing lies below, a whiteout hides nothing, and the overlay would list it like a file. */
	if (!error && !((whole || above->own_ends) && is_whiteout(&found->info))) {
		if (S_ISDIR(found->info.st_mode)) {
			AUTOCLOSE int made = mkdirat(target, name, 0700) < 0
						     ? -1
						     : openat(target, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
			error = made < 0 ? -errno : make_directory(found, made, path, whole);
		} else {
			error = S_ISREG(found->info.st_mode) ? make_file(found, target, name, path)
							     : make_other(found, target, name);
		}
	}
	path[length] = 0;
	depth--;
	if (found)
		release(found);
	free(found);
	return error;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(a, b);
}

/* Each name that any of the layers, down to one, has, once: in a tree. 0 or -errno. */
static int collect(const struct found *found, int down_to, void **names)
{
	for (int layer = 0; layer < down_to; layer++) {
		int fd = found->dirs[layer] < 0 ? -1 : openat(found->dirs[layer], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		DIR *directory = fd < 0 ? NULL : fdopendir(fd);
		if (!directory && found->dirs[layer] >= 0)
			return -errno;
		for (struct dirent *entry; directory && (entry = readdir(directory));) {
			if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
				continue;
			char *name = strdup(entry->d_name);
			char **known = name ? tsearch(name, names, by_name) : NULL;
			if (!known) {
				closedir(directory);
				return -ENOMEM;
			}
			if (*known != name)
				free(name);
		}
		if (directory)
			closedir(directory);
	}
	return 0;
}

/* Its contents first, its times last. `whole`: what lies below our own layers belongs to it under another
 * path, and is made too. */
static int make_directory(const struct found *found, int target, char *path, bool whole)
{
	void *names = NULL;
	whole = whole || (own < count && strcmp(found->under, path) != 0);
	int error = collect(found, whole ? count : own, &names);

	while (names) {
		char *name = *(char **)names;
		tdelete(name, &names, by_name);
		if (!error)
			error = make(found, target, name, path, whole);
		free(name);
	}
	if (!error && path[0] && (whole || found->own_ends))
		error = mark(target, opaque, "y");
	else if (!error && path[0] && strcmp(found->under, path) != 0)
		error = mark(target, redirect, found->under);
	return error ? error : dress(found->dirs[found->layer], target, &found->info);
}

int merge(const int *layers, int wanted, int ours, int target, bool lasts)
{
	static char path[PATH_MAX];
	struct found *top = calloc(1, sizeof *top);

	opaque = host.rootless ? "user.overlay.opaque" : "trusted.overlay.opaque";
	redirect = host.rootless ? "user.overlay.redirect" : "trusted.overlay.redirect";
	metacopy = host.rootless ? "user.overlay.metacopy" : "trusted.overlay.metacopy";
	count = wanted;
	own = ours;
	target_root = target;
	deepest = lasts ? MERGE_DEEPEST : INT_MAX;
	longest = lasts ? MERGE_LONGEST : PATH_MAX;
	if (!top)
		return -ENOMEM;
	for (int layer = 0; layer < MERGE_MAX; layer++)
		top->dirs[layer] = layer < count ? (roots[layer] = layers[layer]) : -1;
	top->layer = 0;
	umask(0);
	return fstat(layers[0], &top->info) < 0 ? -errno : make_directory(top, target, path, false);
}
