#include "launcher/overlay_merge.h"

#include "launcher/host.h"
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

#define LIST (64u << 10) /* the kernel's maximum for xattrs */

static int roots[MERGE_MAX], count, own_count, target_root;
static int depth, depth_max; /* of the directory that is being copied */
static size_t path_max;      /* longest path */
static const char *xattr_opaque, *xattr_redirect, *xattr_metacopy;
static void *links; /* files with several hard links, each with the first path that was made */

struct link {
	int layer;
	ino_t file;
	char *path;
};

/* One name of a directory, looked up in all layers. */
struct merged {
	int dirs[MERGE_MAX]; /* of a directory: its descriptor in each layer that it merges, else -1 */
	struct stat info;
	int layer;  /* the uppermost layer that has it, or -1 */
	int parent; /* its directory and name in that layer */
	char leaf[NAME_MAX + 1];
	int data;              /* of a file: the layer file with its data, -1 if only a lower layer has the data */
	bool hides_below;      /* it needs nothing from below our own layers */
	char origin[PATH_MAX]; /* else: its path there, from the root */
	bool redirected;       /* that path is not simply the parent's plus the name */
};

/* A lookup downwards through the layers, as the kernel does it (ovl_lookup in fs/overlayfs/namei.c). */
struct lookup {
	char name[PATH_MAX]; /* for the next layer: a name in the same directory, or a path from the root */
	bool stops;          /* do not look in further layers */
};

static bool is_whiteout(const struct stat *info)
{
	return S_ISCHR(info->st_mode) && info->st_rdev == makedev(0, 0);
}

static ssize_t get_xattr(int fd, const char *name, char *value, size_t size)
{
	ssize_t got = fgetxattr(fd, name, value, size - 1);

	value[got < 0 ? 0 : got] = 0;
	return got;
}

static int check_path_length(int printed)
{
	return printed < 0 || printed >= PATH_MAX ? -ENAMETOOLONG : 0;
}

/* Follow the redirect xattr of a renamed directory or a metacopy file to its place in the layers below. A plain name is
 * in the same directory. A path counts from the root, even below an opaque directory, because the file was moved there
 * from elsewhere. `rest` is the length of the name after the renamed part. */
static int follow_redirect(int fd, struct lookup *lookup, size_t rest)
{
	char value[PATH_MAX], name[PATH_MAX];
	size_t end = strlen(lookup->name) - rest, begin = end;

	if (get_xattr(fd, xattr_redirect, value, sizeof value) <= 0)
		return 0;
	while (begin > 0 && lookup->name[begin - 1] != '/')
		begin--;
	if (value[0] == '/') {
		lookup->stops = false;
		begin = 0;
	}
	int error = check_path_length(
		snprintf(name, sizeof name, "%.*s%s%s", (int)begin, lookup->name, value, lookup->name + end));
	if (!error)
		strcpy(lookup->name, name);
	return error;
}

static bool is_opaque(int fd)
{
	char value[2];

	return get_xattr(fd, xattr_opaque, value, sizeof value) > 0;
}

/* Open one directory on the way to the name. Returns a descriptor, -1 if there is none, or -errno - 1. */
static int enter_directory(int at, const char *part, size_t rest, struct lookup *lookup)
{
	struct stat info;

	if (fstatat(at, part, &info, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT ? -1 : -errno - 1;
	if (!S_ISDIR(info.st_mode)) {
		lookup->stops = true;
		return -1;
	}
	int fd = openat(at, part, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), error = 0;
	if (fd < 0)
		return -errno - 1;
	if (is_opaque(fd))
		lookup->stops = true;
	else
		error = follow_redirect(fd, lookup, rest);
	if (error)
		close(fd);
	return error ? error - 1 : fd;
}

/* Look up the last part of the name in one layer: 0 or -errno. */
static int lookup_leaf(int layer, int parent, const char *leaf, struct lookup *lookup, struct merged *merged)
{
	struct stat info;
	char value[LIST];

	if (fstatat(parent, leaf, &info, AT_SYMLINK_NOFOLLOW) < 0)
		return errno == ENOENT ? 0 : -errno;
	bool first = merged->layer < 0, is_directory = S_ISDIR(info.st_mode);
	if (!first && is_directory != S_ISDIR(merged->info.st_mode)) {
		lookup->stops = true;
		return 0;
	}
	if (first) {
		merged->layer = layer;
		merged->info = info;
		merged->parent = fcntl(parent, F_DUPFD_CLOEXEC, 3);
		snprintf(merged->leaf, sizeof merged->leaf, "%s", leaf);
	}
	if (!is_directory && !S_ISREG(info.st_mode)) {
		lookup->stops = true;
		return 0;
	}
	int fd = openat(parent, leaf, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	bool here = is_directory ? is_opaque(fd) : get_xattr(fd, xattr_metacopy, value, sizeof value) < 0;
	int error = here ? 0 : follow_redirect(fd, lookup, 0);
	lookup->stops = lookup->stops || here;
	if (is_directory)
		merged->dirs[layer] = fd;
	else if (here)
		merged->data = fd;
	else
		close(fd);
	return error;
}

/* Look up the whole name in one layer. Its directories may have redirects too. 0 or -errno. */
static int lookup_path(int layer, int base, struct lookup *lookup, struct merged *merged)
{
	size_t rest = strlen(lookup->name) - (lookup->name[0] == '/');
	int at = fcntl(base, F_DUPFD_CLOEXEC, 3), error = 0;

	while (at >= 0) {
		char part[NAME_MAX + 1];
		const char *name = lookup->name + strlen(lookup->name) - rest;
		size_t length = strcspn(name, "/");
		if (length >= sizeof part)
			break; /* no file system has such a long name */
		snprintf(part, sizeof part, "%.*s", (int)length, name);
		if (length == rest) {
			error = lookup_leaf(layer, at, part, lookup, merged);
			break;
		}
		int next = enter_directory(at, part, rest - length, lookup);
		close(at);
		at = next;
		rest -= length + 1;
	}
	if (at < -1)
		return at + 1;
	close_fd(&at);
	return error;
}

static void close_merged(struct merged *merged)
{
	for (int layer = 0; layer < count; layer++)
		close_fd(&merged->dirs[layer]);
	close_fd(&merged->parent);
	close_fd(&merged->data);
}

static void init_merged(struct merged *merged)
{
	*merged = (struct merged){.layer = -1, .parent = -1, .data = -1};
	for (int layer = 0; layer < count; layer++)
		merged->dirs[layer] = -1;
}

/* After our own layers: record where the layers below have the rest. 0 or -errno. */
static int record_origin(const struct merged *above, const char *name, const struct lookup *lookup,
			 struct merged *merged)
{
	bool from_root = lookup->name[0] == '/';
	char usual[PATH_MAX];

	merged->hides_below = lookup->stops || (!from_root && above->hides_below);
	if (merged->hides_below)
		return 0;
	int error = above->hides_below ? 0 : check_path_length(snprintf(usual, sizeof usual, "%s/%s", above->origin, name));
	if (!error)
		error = check_path_length(from_root ? snprintf(merged->origin, sizeof merged->origin, "%s", lookup->name)
				       : snprintf(merged->origin, sizeof merged->origin, "%s/%s", above->origin, lookup->name));
	merged->redirected = above->hides_below || strcmp(merged->origin, usual) != 0;
	return error;
}

static int resolve(const struct merged *above, const char *name, struct merged *merged)
{
	struct lookup lookup = {.stops = false};
	int error = 0;

	init_merged(merged);
	strcpy(lookup.name, name);
	for (int layer = 0; layer < count && !error; layer++) {
		int base = lookup.name[0] == '/' ? roots[layer] : above->dirs[layer];
		if (base >= 0 && !lookup.stops)
			error = lookup_path(layer, base, &lookup, merged);
		if (!error && layer == own_count - 1)
			error = record_origin(above, name, &lookup, merged);
	}
	return error;
}

/* --- Write the result ---------------------------------------------------------------------------- */

static int copy_attributes(int from, int to)
{
	static char names[LIST], value[LIST];
	ssize_t size = flistxattr(from, names, sizeof names);

	for (ssize_t at = 0; at < size; at += (ssize_t)strlen(names + at) + 1) {
		const char *name = names + at;
		/* No process in a sandbox can set these. If one could, they would redirect into other layers. */
		if (!strncmp(name, "trusted.", 8) || !strncmp(name, "user.overlay.", 13))
			continue;
		ssize_t length = fgetxattr(from, name, value, sizeof value);
		if (length >= 0 && fsetxattr(to, name, value, (size_t)length, 0) < 0 && errno == ENOSPC)
			return -ENOSPC;
	}
	return 0;
}

static int set_xattr(int fd, const char *name, const char *value)
{
	return fsetxattr(fd, name, value, strlen(value), 0) < 0 ? -errno : 0;
}

static int copy_metadata(int from, int to, const struct stat *info)
{
	const struct timespec times[2] = {info->st_atim, info->st_mtim};

	if (fchown(to, info->st_uid, info->st_gid) < 0 || fchmod(to, info->st_mode & 07777) < 0)
		return -errno;
	int error = copy_attributes(from, to);
	return error ? error : futimens(to, times) < 0 ? -errno : 0;
}

/* Keep holes: a sparse file can claim any size. */
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

/* If another name of the file exists already, link to it. 1 if linked, 0 if this is the first name, or -errno. */
static int link_known(const struct merged *merged, int target, const char *name, const char *path)
{
	struct link *link = malloc(sizeof *link);

	if (!link)
		return -ENOMEM;
	*link = (struct link){merged->layer, merged->info.st_ino, NULL};
	struct link **known = tsearch(link, &links, by_file);
	if (known && *known != link) {
		free(link);
		return linkat(target_root, (*known)->path, target, name, 0) < 0 ? -errno : 1;
	}
	link->path = strdup(path + 1);
	return known && link->path ? 0 : -ENOMEM;
}

static int copy_file(const struct merged *merged, int target, const char *name, const char *path)
{
	char value[LIST];
	int error = merged->info.st_nlink > 1 ? link_known(merged, target, name, path) : 0;

	if (error)
		return error < 0 ? error : 0;
	AUTOCLOSE int from = openat(merged->parent, merged->leaf, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
	AUTOCLOSE int to = openat(target, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (from < 0 || to < 0)
		return -errno;
	if (merged->data >= 0) {
		error = copy_data(merged->data, to, merged->info.st_size);
	} else {
		/* A metacopy file: keep the reference to its data below. */
		ssize_t size = get_xattr(from, xattr_metacopy, value, sizeof value);
		if (ftruncate(to, merged->info.st_size) < 0 || size < 0 ||
		    fsetxattr(to, xattr_metacopy, value, (size_t)size, 0) < 0)
			return -errno;
		/* With several hard links, each name needs the redirect. */
		if (merged->redirected || merged->info.st_nlink > 1)
			error = set_xattr(to, xattr_redirect, merged->origin);
	}
	return error ? error : copy_metadata(from, to, &merged->info);
}

static int copy_special(const struct merged *merged, int target, const char *name)
{
	char value[PATH_MAX];
	const struct stat *info = &merged->info;
	const struct timespec times[2] = {info->st_atim, info->st_mtim};

	if (S_ISLNK(info->st_mode)) {
		ssize_t size = readlinkat(merged->parent, merged->leaf, value, sizeof value - 1);
		value[size < 0 ? 0 : size] = 0;
		if (size < 0 || symlinkat(value, target, name) < 0)
			return -errno;
	} else if (is_whiteout(info) || S_ISFIFO(info->st_mode) || S_ISSOCK(info->st_mode)) {
		if (mknodat(target, name, info->st_mode, 0) < 0)
			return -errno;
	} else {
		return 0; /* a sandbox cannot create devices */
	}
	/* The mode last: chown clears the set-user-ID bit. */
	if (fchownat(target, name, info->st_uid, info->st_gid, AT_SYMLINK_NOFOLLOW) < 0 ||
	    (!S_ISLNK(info->st_mode) && fchmodat(target, name, info->st_mode & 07777, 0) < 0) ||
	    utimensat(target, name, times, AT_SYMLINK_NOFOLLOW) < 0)
		return -errno;
	return 0;
}

static int copy_directory(const struct merged *merged, int target, char *path, bool copy_all);

static int copy_entry(const struct merged *above, int target, const char *name, char *path, bool copy_all)
{
	struct merged *merged = malloc(sizeof *merged);
	size_t length = strlen(path);
	int error = !merged ? -ENOMEM : length + 1 + strlen(name) < path_max && depth < depth_max ? 0 : -ENAMETOOLONG;

	depth++;
	if (merged)
		init_merged(merged);
	if (!error) {
		sprintf(path + length, "/%s", name);
		error = resolve(above, name, merged);
	}
	/* With nothing below, a whiteout hides nothing, and overlayfs would list it as a file. */
	if (!error && !((copy_all || above->hides_below) && is_whiteout(&merged->info))) {
		if (S_ISDIR(merged->info.st_mode)) {
			AUTOCLOSE int directory = mkdirat(target, name, 0700) < 0
						     ? -1
						     : openat(target, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
			error = directory < 0 ? -errno : copy_directory(merged, directory, path, copy_all);
		} else {
			error = S_ISREG(merged->info.st_mode) ? copy_file(merged, target, name, path)
							     : copy_special(merged, target, name);
		}
	}
	path[length] = 0;
	depth--;
	if (merged)
		close_merged(merged);
	free(merged);
	return error;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(a, b);
}

/* Collect each name in the upper `down_to` layers once, in a search tree. 0 or -errno. */
static int collect_names(const struct merged *merged, int down_to, void **names)
{
	for (int layer = 0; layer < down_to; layer++) {
		int fd = merged->dirs[layer] < 0 ? -1 : openat(merged->dirs[layer], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		DIR *directory = fd < 0 ? NULL : fdopendir(fd);
		if (!directory && merged->dirs[layer] >= 0)
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

/* The contents first, the times last. `copy_all`: the parts below our own layers come from another path, so copy them
 * too. */
static int copy_directory(const struct merged *merged, int target, char *path, bool copy_all)
{
	void *names = NULL;
	copy_all = copy_all || (own_count < count && merged->redirected);
	int error = collect_names(merged, copy_all ? count : own_count, &names);

	while (names) {
		char *name = *(char **)names;
		tdelete(name, &names, by_name);
		if (!error)
			error = copy_entry(merged, target, name, path, copy_all);
		free(name);
	}
	if (!error && path[0] && (copy_all || merged->hides_below))
		error = set_xattr(target, xattr_opaque, "y");
	else if (!error && merged->redirected)
		error = set_xattr(target, xattr_redirect, merged->origin);
	return error ? error : copy_metadata(merged->dirs[merged->layer], target, &merged->info);
}

int overlay_merge(const int *layers, int total, int own, int target, bool on_disk)
{
	static char path[PATH_MAX];
	struct merged *top = calloc(1, sizeof *top);

	xattr_opaque = host.rootless ? "user.overlay.opaque" : "trusted.overlay.opaque";
	xattr_redirect = host.rootless ? "user.overlay.redirect" : "trusted.overlay.redirect";
	xattr_metacopy = host.rootless ? "user.overlay.metacopy" : "trusted.overlay.metacopy";
	count = total;
	own_count = own;
	target_root = target;
	depth_max = on_disk ? MERGE_DEPTH_MAX : INT_MAX;
	path_max = on_disk ? MERGE_PATH_MAX : PATH_MAX;
	if (!top)
		return -ENOMEM;
	for (int layer = 0; layer < MERGE_MAX; layer++)
		top->dirs[layer] = layer < count ? (roots[layer] = layers[layer]) : -1;
	top->layer = 0;
	umask(0);
	return fstat(layers[0], &top->info) < 0 ? -errno : copy_directory(top, target, path, false);
}
