#include "setup/place.h"

#include "launcher/host.h"
#include "launcher/layers.h"
#include "sys.h"

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

/* An image decides what is in its layers, so no link may lead out of one. The path has no "..". A descriptor or
 * -errno. */
static int open_below(const char *root, const char *path, int flags)
{
	char whole[LAYER_PATH + 2 + MOUNTPOINT_MAX];

	snprintf(whole, sizeof whole, "%s/%s", root, path);
	return open_no_magiclinks(AT_FDCWD, whole, flags | O_DIRECTORY, 0, RESOLVE_NO_SYMLINKS);
}

/* --- Plain directories --------------------------------------------------------------------------- */

/* Not with readdir, whose buffer would have to be allocated for each creation. */
static bool is_empty(int directory)
{
	char entries[1024];
	long size, at = 0;
	int count = 0;

	while ((size = syscall(SYS_getdents64, directory, entries, sizeof entries)) > 0)
		for (at = 0; at < size; count++) {
			uint16_t length; /* after inode and offset */
			memcpy(&length, entries + at + 16, sizeof length);
			at += length;
		}
	return size == 0 && count == 2; /* "." and ".." */
}

/* Whether no layer has files there. `found` is the uppermost layer's directory, with mode 0 if there is none. */
static bool is_unused(const struct tree *tree, const char *path, struct stat *found)
{
	found->st_mode = 0;
	for (uint32_t i = 0; i < tree->count; i++) {
		char layer[LAYER_PATH];
		layer_path(layer, tree->layers[i]);
		AUTOCLOSE int fd = open_below(layer, path, O_RDONLY);
		if (fd == -ENOENT)
			continue;
		if (fd < 0 || (!found->st_mode && fstat(fd, found) < 0) || !is_empty(fd))
			return false;
	}
	return true;
}

/* With the owner and mode of the directory that it covers. If it cannot have them, there is none. The umask is 0, and
 * our file system ids are those of root in the sandbox. */
static void create_plain(const char *name, const struct stat *below, uint32_t root)
{
	char path[sizeof UPPER + 1 + MOUNTPOINT_MAX];
	mode_t mode = below->st_mode ? below->st_mode & 07777 : strcmp(name, "tmp") == 0 ? 01777 : 0755;
	bool own = !below->st_mode || (below->st_uid == root && below->st_gid == root);

	snprintf(path, sizeof path, UPPER "/%s", name);
	if (mkdir(path, mode & 01777) < 0)
		return;
	if ((!own && lchown(path, below->st_uid, below->st_gid) < 0) || (mode & ~01777u && chmod(path, mode) < 0))
		rmdir(path);
}

void places_prepare(const struct create *spec, uint32_t root)
{
	struct stat below;

	for (uint32_t i = 0; !host.rootless && i < spec->places; i++)
		if (spec->place[i].kind == PLACE_PLAIN && is_unused(&spec->tree[0], spec->place[i].path, &below))
			create_plain(spec->place[i].path, &below, root);
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

/* Only places_prepare has created a directory in the upper file system, which is new: the path has no links. */
static int mount_plain(const struct place *place)
{
	char from[sizeof UPPER + 1 + MOUNTPOINT_MAX], to[sizeof "/new/" + MOUNTPOINT_MAX];

	snprintf(from, sizeof from, UPPER "/%s", place->path);
	snprintf(to, sizeof to, "/new/%s", place->path);
	AUTOCLOSE int mount = mount_clone(AT_FDCWD, from, false);
	return mount < 0 ? mount : mount_attach(mount, to);
}

static int mount_fixed(const struct create *spec, const struct place *place)
{
	AUTOCLOSE int source = open_fixed(spec, place->path);
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

	for (uint32_t i = 0; !host.rootless && i < spec->places; i++) {
		const struct place *place = &spec->place[i];
		if ((place->kind == PLACE_PLAIN ? mount_plain(place) : mount_fixed(spec, place)) == 0)
			mounted |= 1u << i;
	}
	return mounted;
}
