/* Search for files by name, and for lines by text or regular expression. It runs in a worker process, so a large tree
 * or a slow pattern blocks no other request and can be killed like a command. */
#include "pid1/init.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEPTH_MAX 128
#define FILE_MAX (64u << 20)    /* larger files are skipped */
#define BINARY_PROBE (8u << 10) /* a NUL within this many bytes means a binary file */
#define OUT (64u << 10)
#define STRINGS_MAX 256u

/* The request. Set before the worker is forked. */
static struct search request;
static const char *root, *pattern, *strings[STRINGS_MAX];
static size_t pattern_size;
static regex_t expression;

static char out[OUT], path[PATH_MAX];
static size_t out_used, reported;
static int out_fd;
static uint32_t match_count, skipped_files;
static bool full;

static int flush(void)
{
	int error = write_all(out_fd, out, out_used);

	out_used = 0;
	return error;
}

static int put(const void *data, size_t size)
{
	int error = out_used + size > OUT ? flush() : 0;

	if (error || size > OUT)
		return error ? error : write_all(out_fd, data, size);
	memcpy(out + out_used, data, size);
	out_used += size;
	return 0;
}

static int report(uint32_t line, const char *text, size_t size)
{
	struct match match = {.line = line, .path_size = (uint32_t)strlen(path)};
	int error;

	match.flags = size > request.width ? MATCH_CUT : 0;
	match.text_size = (uint32_t)(size > request.width ? request.width : size);
	reported += sizeof match + match.path_size + match.text_size;
	if (match_count == request.matches || reported > LISTING_MAX) {
		full = true;
		return 0;
	}
	match_count++;
	error = put(&match, sizeof match);
	error = error ? error : put(path, match.path_size);
	return error ? error : put(text, match.text_size);
}

/* The next match of the pattern; the text ends with NUL. */
static const char *next_match(const char *at, const char *end)
{
	regmatch_t match;

	if (request.flags & (SEARCH_REGEX | SEARCH_NOCASE))
		return regexec(&expression, at, 1, &match, 0) == 0 ? at + match.rm_so : NULL;
	return memmem(at, (size_t)(end - at), pattern, pattern_size);
}

static int search_text(char *text, size_t size)
{
	const char *end = text + size, *counted = text;
	uint32_t line = 1;
	int error = 0;

	for (const char *at = text; at < end && !full && !error;) {
		const char *match = next_match(at, end);
		if (!match || match >= end)
			break;
		for (const char *next; (next = memchr(counted, '\n', (size_t)(match - counted))); counted = next + 1)
			line++;
		const char *stop = memchr(match, '\n', (size_t)(end - match));
		stop = stop ? stop : end;
		const char *start = memrchr(at, '\n', (size_t)(match - at));
		start = start ? start + 1 : at;
		error = report(line, start, (size_t)(stop - start));
		at = stop + 1;
	}
	return error;
}

static int search_file(int parent, const char *name)
{
	AUTOCLOSE int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	struct stat found;
	static char *text;
	static size_t space;
	size_t have = 0;

	if (fd < 0 || fstat(fd, &found) < 0 || !S_ISREG(found.st_mode) || found.st_size > (off_t)FILE_MAX) {
		skipped_files++;
		return 0;
	}
	size_t size = (size_t)found.st_size;
	if (size + 1 > space) {
		free(text);
		space = size + 1 < 65536 ? 65536 : size + 1;
		text = malloc(space);
		if (!text)
			return -ENOMEM;
	}
	for (ssize_t count; have < size && (count = read(fd, text + have, size - have)) > 0;)
		have += (size_t)count;
	text[have] = 0;
	if (memchr(text, 0, have < BINARY_PROBE ? have : BINARY_PROBE) && !(request.flags & SEARCH_BINARY)) {
		skipped_files++;
		return 0;
	}
	/* regexec() would stop at a NUL. */
	if (request.flags & (SEARCH_REGEX | SEARCH_NOCASE))
		for (char *at = text; (at = memchr(at, 0, have - (size_t)(at - text)));)
			*at = 1;
	return search_text(text, have);
}

static bool name_fits(const char *name)
{
	for (uint32_t i = 0; i < request.names; i++) {
		/* A pattern with a slash applies to the whole relative path. */
		const char *against = strchr(strings[i], '/') ? path : name;
		if (fnmatch(strings[i], against, 0) == 0)
			return true;
	}
	return request.names == 0;
}

static bool is_skipped(const char *name)
{
	for (uint32_t i = 0; i < request.skipped; i++)
		if (fnmatch(strings[request.names + i], name, 0) == 0)
			return true;
	return false;
}

struct name {
	unsigned char type;
	char text[];
};

static int by_name(const void *a, const void *b)
{
	return strcmp((*(struct name *const *)a)->text, (*(struct name *const *)b)->text);
}

/* The sorted names of a directory, so that equal trees give equal answers. NULL with errno. */
static struct name **sorted_names(DIR *directory, size_t *count)
{
	size_t space = 64;
	struct name **names = malloc(space * sizeof *names);

	*count = 0;
	for (struct dirent *entry; names && (entry = readdir(directory));) {
		if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
			continue;
		size_t size = strlen(entry->d_name) + 1;
		struct name *name = malloc(sizeof *name + size);
		struct name **larger = names;
		if (*count == space)
			larger = realloc(names, (space *= 2) * sizeof *names);
		if (!name || !larger)
			_exit(ENOMEM); /* this is a worker process */
		names = larger;
		name->type = entry->d_type;
		memcpy(name->text, entry->d_name, size);
		names[(*count)++] = name;
	}
	if (names)
		qsort(names, *count, sizeof *names, by_name);
	return names;
}

static int walk(int fd, size_t used, int depth);

static int visit(int parent, const struct name *name, size_t used, int depth)
{
	size_t size = strlen(name->text);
	struct stat found;
	int error = 0;

	if (used + size + 2 > sizeof path)
		return 0;
	if (used)
		path[used++] = '/';
	memcpy(path + used, name->text, size + 1);
	bool directory = name->type == DT_DIR, file = name->type == DT_REG;
	if (name->type == DT_UNKNOWN && fstatat(parent, name->text, &found, AT_SYMLINK_NOFOLLOW) == 0) {
		directory = S_ISDIR(found.st_mode);
		file = S_ISREG(found.st_mode);
	}
	if (!*pattern && !(directory && is_skipped(name->text)) && name_fits(name->text))
		error = report(0, "", 0);
	else if (*pattern && file && name_fits(name->text))
		error = search_file(parent, name->text);
	if (!error && directory && depth < DEPTH_MAX && !is_skipped(name->text)) {
		int fd = openat(parent, name->text, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (fd >= 0)
			error = walk(fd, used + size, depth + 1);
	}
	return error;
}

/* Closes the descriptor. `used`: length of the path so far. */
static int walk(int fd, size_t used, int depth)
{
	DIR *directory = fdopendir(fd);
	size_t count = 0;
	int error = 0;

	if (!directory) {
		close(fd);
		return -errno;
	}
	struct name **names = sorted_names(directory, &count);
	for (size_t i = 0; i < count; i++) {
		if (!error && !full) {
			path[used] = 0;
			error = visit(fd, names[i], used, depth);
		}
		free(names[i]);
	}
	free(names);
	closedir(directory);
	return error;
}

static int compile(void)
{
	static char quoted[2 * PATH_MAX];
	const char *text = pattern;

	/* To ignore case, turn the text into a regular expression. */
	if (!(request.flags & SEARCH_REGEX)) {
		size_t used = 0;
		if (pattern_size >= PATH_MAX)
			return -ENAMETOOLONG;
		for (const char *at = pattern; *at; at++) {
			if (strchr("\\^$.[]|()*+?{}", *at))
				quoted[used++] = '\\';
			quoted[used++] = *at;
		}
		quoted[used] = 0;
		text = quoted;
	}
	int flags = REG_EXTENDED | REG_NEWLINE | (request.flags & SEARCH_NOCASE ? REG_ICASE : 0);
	int failed = regcomp(&expression, text, flags);
	if (failed)
		regerror(failed, &expression, out, sizeof out);
	return failed ? -ERROR_PATTERN : 0;
}

static int run(const char *unused, int fd)
{
	struct stat found;
	int error = 0;

	(void)unused;
	out_fd = fd;
	pattern_size = strlen(pattern);
	if (*pattern && request.flags & (SEARCH_REGEX | SEARCH_NOCASE))
		error = compile();
	if (error) {
		write_all(fd, out, strnlen(out, sizeof out));
		return error;
	}
	if (stat(root, &found) < 0)
		return -errno;
	if (S_ISREG(found.st_mode) && *pattern) {
		error = search_file(AT_FDCWD, root);
	} else {
		int directory = open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
		error = directory < 0 ? -errno : walk(directory, 0, 0);
	}
	struct match last = {.line = skipped_files, .flags = MATCH_LAST | (full ? MATCH_TRUNCATED : 0)};
	if (!error)
		error = put(&last, sizeof last);
	return error ? error : flush();
}

int search_start(uint32_t id, char *payload, size_t size)
{
	char *at = payload + sizeof request, *end = payload + size;
	const char *heads[2];

	if (size < sizeof request)
		return -EPROTO;
	memcpy(&request, payload, sizeof request);
	if (request.names > STRINGS_MAX || request.skipped > STRINGS_MAX - request.names)
		return -EPROTO;
	for (uint32_t i = 0; i < 2 + request.names + request.skipped; i++) {
		char *stop = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
		if (!stop)
			return -EPROTO;
		if (i < 2)
			heads[i] = at;
		else
			strings[i - 2] = at;
		at = stop + 1;
	}
	if (at != end)
		return -EPROTO;
	root = heads[0];
	pattern = heads[1];
	return command_streamer(id, run, NULL, request.timeout);
}
