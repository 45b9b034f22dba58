#define _GNU_SOURCE
#include "setup/place.h"

#include "launcher/host.h"
#include "launcher/layers.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#define OPAQUE "trusted.overlay.opaque"
#define REDIRECT "trusted.overlay.redirect"
/* On a directory of the layer above the lowest one: it shows the whole lowest layer, by redirects (rootfs.py). */
#define WHOLE "trusted.dutyfree.whole"

#define UPPER "/up/u0"

bool place_is_valid(const struct place *place)
{
	if (!memchr(place->path, 0, sizeof place->path) || !place->path[0] || place->path[0] == '/' ||
	    strstr(place->path, ".."))
		return false;
	return place->kind == PLACE_FIXED || (place->kind == PLACE_PLAIN && !strchr(place->path, '/'));
}

/* An image decides what is in its layers, so no link may lead out of one. A descriptor or -errno. */
static int open_below(const char *root, const char *path, int flags)
{
	AUTOCLOSE int directory = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);

	if (directory < 0)
		return -errno;
	return open_no_magiclinks(directory, *path ? path : ".", flags | O_DIRECTORY | O_CLOEXEC, 0,
				  RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
}

/* --- Plain directories --------------------------------------------------------------------------- */

static bool is_empty(int fd)
{
	DIR *directory = fdopendir(fd);
	int entries = 0;

	while (directory && entries < 3 && readdir(directory))
		entries++;
	if (directory)
		closedir(directory);
	else
		close(fd);
	return entries == 2; /* "." and ".." */
}

/* Whether no layer has files there. `found` is the uppermost layer's directory, with mode 0 if there is none. */
static bool is_unused(const struct tree *tree, const char *path, struct stat *found)
{
	found->st_mode = 0;
	for (uint32_t i = 0; i < tree->count; i++) {
		char layer[LAYER_PATH];
		layer_path(layer, tree->layers[i]);
		int fd = open_below(layer, path, O_RDONLY);
		if (fd == -ENOENT)
			continue;
		if (fd < 0)
			return false;
		if (!found->st_mode && fstat(fd, found) < 0)
			found->st_mode = 0;
		if (!is_empty(fd))
			return false;
	}
	return true;
}

/* With the owner and mode of the directory that it covers. If it cannot have them, there is none. */
static void create_plain(const char *path, const struct stat *below)
{
	AUTOCLOSE int upper = open(UPPER, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	mode_t mode = below->st_mode ? below->st_mode & 07777 : strcmp(path, "tmp") == 0 ? 01777 : 0755;

	if (upper < 0 || mkdirat(upper, path, 0700) < 0)
		return;
	if ((below->st_mode && fchownat(upper, path, below->st_uid, below->st_gid, AT_SYMLINK_NOFOLLOW) < 0) ||
	    fchmodat(upper, path, mode, 0) < 0)
		unlinkat(upper, path, AT_REMOVEDIR);
}

void places_prepare(const struct create *spec)
{
	struct stat below;

	for (uint32_t i = 0; !host.rootless && i < spec->places; i++)
		if (spec->place[i].kind == PLACE_PLAIN && is_unused(&spec->tree[0], spec->place[i].path, &below))
			create_plain(spec->place[i].path, &below);
}

/* --- Fixed directories --------------------------------------------------------------------------- */

/* The tree that the path is in, and the rest of the path. */
static const struct tree *find_tree(const struct create *spec, const char *path, const char **rest)
{
	const struct tree *found = &spec->tree[0];

	*rest = path;
	for (uint32_t i = 1; i < spec->trees; i++) {
		size_t size = strlen(spec->tree[i].mountpoint);
		if (strncmp(path, spec->tree[i].mountpoint, size) != 0 || (path[size] && path[size] != '/'))
			continue;
		found = &spec->tree[i];
		*rest = path + size + (path[size] == '/');
	}
	return found;
}

/* Whether a layer has the path, or hides it in the layers below. */
static bool changes(const char *layer, const char *path)
{
	char part[LAYER_PATH + MOUNTPOINT_MAX];
	struct stat found;

	for (const char *end = path;; end++) {
		if (*end && *end != '/')
			continue;
		snprintf(part, sizeof part, "%s/%.*s", layer, (int)(end - path), path);
		if (lstat(part, &found) < 0)
			return errno != ENOENT;
		if (!*end || !S_ISDIR(found.st_mode) || lgetxattr(part, OPAQUE, NULL, 0) >= 0 ||
		    lgetxattr(part, REDIRECT, NULL, 0) >= 0)
			return true;
	}
}

static bool shows_lowest_layer(const char *layer, const char *path)
{
	char whole[LAYER_PATH + MOUNTPOINT_MAX];

	snprintf(whole, sizeof whole, "%s/%s", layer, path);
	return lgetxattr(whole, WHOLE, NULL, 0) >= 0;
}

/* The directory in the lowest layer, if no layer above has anything there: a descriptor or -errno. Layers above may
 * refer to layers below them (redirect, metacopy), the lowest cannot. */
static int open_fixed(const struct create *spec, const char *path)
{
	const struct tree *tree = find_tree(spec, path, &path);
	char layer[LAYER_PATH];
	bool whole = false;

	for (uint32_t i = 0; i + 1 < tree->count; i++) {
		layer_path(layer, tree->layers[i]);
		if (i + 2 == tree->count && shows_lowest_layer(layer, path))
			whole = true;
		else if (changes(layer, path))
			return -EEXIST;
	}
	layer_path(layer, tree->layers[tree->count - 1]);
	return open_below(layer, whole ? "" : path, O_PATH);
}

/* --- Both ---------------------------------------------------------------------------------------- */

static int mount_place(const struct create *spec, const struct place *place)
{
	/* Only places_prepare has created a directory in the upper file system, which is new. */
	AUTOCLOSE int source = place->kind == PLACE_PLAIN ? open_below(UPPER, place->path, O_PATH)
							  : open_fixed(spec, place->path);
	AUTOCLOSE int mount = source < 0 ? source : mount_clone(source, "", false);
	AUTOCLOSE int target = mount < 0 ? mount : open_below("/new", place->path, O_PATH);

	if (target < 0)
		return target;
	if (syscall(SYS_move_mount, mount, "", target, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0)
		return -errno;
	return 0;
}

uint32_t places_mount(const struct create *spec)
{
	uint32_t mounted = 0;

	for (uint32_t i = 0; !host.rootless && i < spec->places; i++)
		if (mount_place(spec, &spec->place[i]) == 0)
			mounted |= 1u << i;
	return mounted;
}
