/* Watch for file changes with inotify, in a worker process. What the owner does not read waits in the pipe, then in the
 * kernel's queue. When that is full, an overflow event says that changes were lost. */
#include "pid1/init.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEPTH_MAX 64
#define DIRECTORIES_MAX 16384u
#define WATCHED_EVENTS                                                                                                  \
	(IN_CREATE | IN_DELETE | IN_MODIFY | IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF |       \
	 IN_MOVE_SELF | IN_CLOSE_WRITE)

static struct watch_request request;
static int out_fd, inotify;
/* Path of each watched directory, relative to the first, by watch descriptor. */
static char **paths;
static size_t paths_size;
static uint32_t watched_count;

static int send_change(uint32_t kind, const char *place, const char *name)
{
	static char buffer[sizeof(struct change) + 2 * PATH_MAX];
	struct change change = {.kind = kind};
	size_t used = sizeof change;

	for (const char *part = place; part && *part && used < sizeof change + PATH_MAX;)
		buffer[used++] = *part++;
	if (used > sizeof change && name && *name)
		buffer[used++] = '/';
	for (const char *part = name; part && *part && used < sizeof buffer;)
		buffer[used++] = *part++;
	change.path_size = (uint32_t)(used - sizeof change);
	memcpy(buffer, &change, sizeof change);
	return write_all(out_fd, buffer, used);
}

static char *join_path(const char *place, const char *name)
{
	size_t first = strlen(place), second = strlen(name);
	char *both = malloc(first + second + 2);

	if (!both)
		_exit(ENOMEM);
	memcpy(both, place, first);
	if (first)
		both[first++] = '/';
	memcpy(both + first, name, second + 1);
	return both;
}

/* Takes `place`. Returns 1 if the limit is reached, else 0 or -errno. */
static int add(const char *path, char *place)
{
	if (watched_count >= request.directories) {
		free(place);
		return send_change(IN_Q_OVERFLOW, NULL, NULL) ? -EPIPE : 1;
	}
	int number = inotify_add_watch(inotify, path, WATCHED_EVENTS);
	if (number < 0) {
		int error = -errno;
		free(place);
		return error;
	}
	if ((size_t)number >= paths_size) {
		size_t size = ((size_t)number + 1) * 2;
		paths = realloc(paths, size * sizeof *paths);
		if (!paths)
			_exit(ENOMEM);
		memset(paths + paths_size, 0, (size - paths_size) * sizeof *paths);
		paths_size = size;
	}
	if (!paths[number])
		watched_count++;
	free(paths[number]);
	paths[number] = place;
	return 0;
}

/* Watch all directories below a watched one. With `announce`, report what is there: it was created before we looked. */
static int add_below(const char *path, const char *place, bool announce, int depth)
{
	DIR *directory = depth < DEPTH_MAX ? opendir(path) : NULL;
	int error = 0;

	for (struct dirent *entry; directory && !error && (entry = readdir(directory));) {
		struct stat found;
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0 ||
		    fstatat(dirfd(directory), entry->d_name, &found, AT_SYMLINK_NOFOLLOW) < 0)
			continue;
		bool inner = S_ISDIR(found.st_mode);
		if (announce)
			error = send_change(IN_CREATE | (inner ? IN_ISDIR : 0), place, entry->d_name);
		if (error || !inner)
			continue;
		char *below = join_path(path, entry->d_name), *name = join_path(place, entry->d_name);
		char *copy = strdup(name);
		int added = copy ? add(below, copy) : -ENOMEM;
		if (added == 0)
			error = add_below(below, name, announce, depth + 1);
		else if (added == -EPIPE || added == -ENOSPC)
			error = added;
		free(below);
		free(name);
	}
	if (directory)
		closedir(directory);
	return error;
}

static int handle_event(const char *root, const struct inotify_event *event)
{
	if (event->mask & IN_Q_OVERFLOW)
		return send_change(IN_Q_OVERFLOW, NULL, NULL);
	char *place = event->wd >= 0 && (size_t)event->wd < paths_size ? paths[event->wd] : NULL;
	if (!place)
		return 0;
	if (event->mask & IN_IGNORED) {
		bool first = !*place;
		free(place);
		paths[event->wd] = NULL;
		watched_count--;
		return first ? -ENOENT : 0; /* the root was removed, which was reported */
	}
	/* The parent of an inner directory reports this too. */
	if (event->mask & (IN_DELETE_SELF | IN_MOVE_SELF) && *place)
		return 0;
	int error = send_change(event->mask, place, event->len ? event->name : NULL);
	if (error || !(request.flags & WATCH_RECURSIVE) || !(event->mask & IN_ISDIR) ||
	    !(event->mask & (IN_CREATE | IN_MOVED_TO)))
		return error;
	char *name = join_path(place, event->name), *path = join_path(root, name), *copy = strdup(name);
	int added = copy ? add(path, copy) : -ENOMEM;
	if (added == 0)
		error = add_below(path, name, true, 1);
	else if (added == -EPIPE)
		error = added;
	free(path);
	free(name);
	return error;
}

static int run(const char *root, int fd)
{
	static char buffer[64 << 10] __attribute__((aligned(8)));
	char *first = strdup("");
	int error;

	out_fd = fd;
	inotify = inotify_init1(IN_CLOEXEC);
	if (inotify < 0 || !first)
		return -errno;
	error = add(root, first);
	if (!error && request.flags & WATCH_RECURSIVE)
		error = add_below(root, "", false, 0);
	if (!error)
		error = send_change(0, NULL, NULL);
	while (!error) {
		ssize_t size = read(inotify, buffer, sizeof buffer);
		if (size < 0 && errno == EINTR)
			continue;
		if (size <= 0)
			return -errno;
		for (char *at = buffer; at < buffer + size && !error;) {
			const struct inotify_event *event = (const void *)at;
			error = handle_event(root, event);
			at += sizeof *event + event->len;
		}
	}
	return error;
}

int watch_start(uint32_t id, const char *payload, size_t size)
{
	if (size < sizeof request + 1)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	const char *path = payload + sizeof request;
	if (payload[size - 1] || strlen(path) != size - sizeof request - 1 || request.directories == 0 ||
	    request.directories > DIRECTORIES_MAX)
		return -EPROTO;
	return command_streamer(id, run, path, 0);
}
