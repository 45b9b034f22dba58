/* Replace a text that occurs exactly once in a file. The new file replaces the old one by rename, so readers see one or
 * the other, and a failed edit changes nothing. */
#include "pid1/init.h"
#include "sys.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct text {
	char *data;
	size_t size;
};

static int read_text(int fd, const struct stat *found, struct text *text)
{
	if (!S_ISREG(found->st_mode))
		return S_ISDIR(found->st_mode) ? -EISDIR : -ERROR_SPECIAL;
	if (found->st_size > (off_t)EDIT_MAX)
		return -EFBIG;
	text->data = malloc((size_t)found->st_size + 1);
	if (!text->data)
		return -ENOMEM;
	while (text->size < (size_t)found->st_size) {
		ssize_t count = read(fd, text->data + text->size, (size_t)found->st_size - text->size);
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			return -errno;
		if (count == 0)
			break;
		text->size += (size_t)count;
	}
	return 0;
}

/* Find the text. If it does not occur exactly once, send the count and the lines, and return NULL. */
static const char *find_once(uint32_t id, const struct text *text, const char *old, size_t old_size)
{
	struct {
		int32_t error;
		uint32_t count, lines[EDIT_LINES];
	} answer = {.error = ERROR_NOT_ONCE};
	const char *end = text->data + text->size, *found = NULL, *counted = text->data;
	uint32_t line = 1, kept = 0;

	for (const char *at = text->data; (at = memmem(at, (size_t)(end - at), old, old_size)); at += old_size) {
		found = found ? found : at;
		for (; answer.count < EDIT_LINES && counted < at; counted++)
			line += *counted == '\n';
		if (answer.count++ < EDIT_LINES)
			answer.lines[kept++] = line;
	}
	if (answer.count == 1)
		return found;
	outbox_frame(FRAME_DONE, 0, id, &answer, 2 * sizeof(uint32_t) + kept * sizeof(uint32_t), NULL, 0);
	return NULL;
}

static int write_parts(int fd, const struct text parts[3])
{
	int error = 0;

	for (int i = 0; i < 3 && !error; i++)
		error = write_all(fd, parts[i].data, parts[i].size);
	return error;
}

/* Write a temporary file in the same directory, with owner and mode of the old one, then rename it. */
static int replace(int directory, const char *name, const struct stat *found, const struct text parts[3])
{
	static unsigned number;
	const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
	char scratch[64];

	snprintf(scratch, sizeof scratch, ".dutyfree-%u", ++number);
	int fd = openat(directory, scratch, flags, 0600);
	if (fd < 0 && errno == EEXIST) { /* from an interrupted edit, or a user's file: take another name */
		snprintf(scratch, sizeof scratch, ".dutyfree-%u-%llx", ++number, (unsigned long long)now());
		fd = openat(directory, scratch, flags, 0600);
	}
	if (fd < 0)
		return -errno;
	int error = write_parts(fd, parts);
	if (!error && (fchown(fd, found->st_uid, found->st_gid) < 0 || fchmod(fd, found->st_mode & 07777) < 0))
		error = -errno;
	close(fd);
	if (!error && renameat(directory, scratch, directory, name) < 0)
		error = -errno;
	if (error)
		unlinkat(directory, scratch, 0);
	return error;
}

static int apply(uint32_t id, const char *path, const char *old, const struct edit *request)
{
	char real[PATH_MAX];
	AUTOCLOSE int directory = -1;
	AUTOCLOSE int fd = -1;
	struct stat found;
	struct text text = {0};

	/* Follow symbolic links once; chroot keeps us inside. */
	if (!realpath(path, real))
		return -errno;
	/* From here on follow no links, even if someone puts them in place meanwhile. All work is relative to this
	 * directory. */
	char *name = strrchr(real, '/') + 1;
	name[-1] = 0;
	directory = open_no_magiclinks(AT_FDCWD, *real ? real : "/", O_PATH | O_DIRECTORY, 0, RESOLVE_NO_SYMLINKS);
	if (directory < 0)
		return directory;
	fd = openat(directory, *name ? name : ".", O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW);
	if (fd < 0)
		return errno == ENXIO ? -ERROR_SPECIAL : -errno;
	if (fstat(fd, &found) < 0)
		return -errno;
	int error = read_text(fd, &found, &text);
	const char *at = error ? NULL : find_once(id, &text, old, request->old_size);
	if (at) {
		size_t before = (size_t)(at - text.data);
		const struct text parts[3] = {
			{text.data, before},
			{(char *)old + request->old_size, request->new_size},
			{text.data + before + request->old_size, text.size - before - request->old_size},
		};
		error = replace(directory, name, &found, parts);
		if (!error)
			outbox_done(id, 0);
	}
	free(text.data);
	return error;
}

int edit_file(uint32_t id, const char *payload, size_t size)
{
	struct edit request;

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	const char *path = payload + sizeof request;
	const char *end = memchr(path, 0, size - sizeof request);
	if (!end || request.old_size == 0 ||
	    (uint64_t)request.old_size + request.new_size != (uint64_t)(payload + size - (end + 1)))
		return -EPROTO;
	return apply(id, path, end + 1, &request);
}
