/* Searches. The input is the payload of a frame (two bytes of size, then the bytes), and the text of a file to search
 * in. */
#include "pid1/search.c"
#include "jail.h"

#include <sys/mman.h>

static int output = -1;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	jail_enter();
	mkdir("inner", 0755);
	jail_file("inner/one.py", "one\ntwo\nThree\n", 14);
	jail_file("binary", "one\0two\n", 8);
	jail_file("empty", "", 0);
	output = memfd_create("said", MFD_CLOEXEC);
	return 0;
}

int __wrap_regcomp(regex_t *compiled, const char *text, int flags);
int __real_regcomp(regex_t *compiled, const char *text, int flags);

/* Skip expressions that the C library compiles slowly: the real process has a deadline. */
int __wrap_regcomp(regex_t *compiled, const char *text, int flags)
{
	return strlen(text) > 64 || strpbrk(text, "{123456789") ? REG_ESPACE : __real_regcomp(compiled, text, flags);
}

/* Parse the answer as the owner does. */
static void check_answer(void)
{
	static char answer[1 << 20];
	ssize_t size = pread(output, answer, sizeof answer, 0);
	struct match match = {.flags = 0};
	uint32_t count = 0;

	if (size == sizeof answer)
		return; /* too long to check */
	for (const char *at = answer; at < answer + size; at += match.path_size + match.text_size) {
		require(!(match.flags & MATCH_LAST) && (size_t)(answer + size - at) >= sizeof match,
			"nothing follows the last match");
		memcpy(&match, at, sizeof match);
		at += sizeof match;
		require(match.path_size < PATH_MAX && match.text_size <= request.width,
			"sizes are within the requested limits");
		require((uint64_t)match.path_size + match.text_size <= (uint64_t)(answer + size - at),
			"sizes fit the answer");
		count++;
	}
	require(match.flags & MATCH_LAST && count - 1 <= request.matches, "no more matches than requested");
}

int __wrap_command_streamer(uint32_t id, int (*body)(const char *, int), const char *argument, uint64_t timeout);

/* Run it here, not in a worker process. */
int __wrap_command_streamer(uint32_t id, int (*body)(const char *, int), const char *argument, uint64_t timeout)
{
	(void)id, (void)timeout;
	if (root[0] == '/' || strstr(root, "..")) /* searching the rest of the host takes too long */
		return 0;
	if (ftruncate(output, 0) < 0 || lseek(output, 0, SEEK_SET) < 0)
		abort();
	out_used = match_count = skipped_files = 0;
	full = false;
	memset(&expression, 0, sizeof expression);
	path[0] = 0;
	if (body(argument, output) == 0)
		check_answer();
	regfree(&expression);
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint16_t first;

	if (size < sizeof first)
		return 0;
	memcpy(&first, data, sizeof first);
	data += sizeof first;
	size -= sizeof first;
	if (first > size)
		first = (uint16_t)size;
	char *exact = memcpy(malloc(first + 1u), data, first); /* exact size, so that the sanitizer sees every read
							        * beyond it */
	jail_file("text", data + first, size - first);
	search_start(1, exact, first);
	free(exact);
	return 0;
}
