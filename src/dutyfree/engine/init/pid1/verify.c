/* Verify that the sandbox is as fresh as before its first command.
 *
 * Every write takes an inode or a block of the one writable file system. So its two counters show whether any file,
 * directory or whiteout was left, removed or changed. */
#include "launcher/host.h"
#include "pid1/init.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <unistd.h>

static struct state {
	uint64_t blocks, files;
	struct rlimit processes, open_files;
} initial;

static void read_state(struct state *state)
{
	/* With files on disk, /dev/shm is a file system of its own. */
	static const char *const writable[] = {"/", "/dev/shm"};
	struct statfs written;

	state->blocks = state->files = 0;
	for (size_t i = 0; i < sizeof writable / sizeof *writable; i++)
		if (statfs(writable[i], &written) == 0) {
			state->blocks += written.f_blocks - written.f_bfree;
			state->files += written.f_files - written.f_ffree;
		}
	getrlimit(RLIMIT_NPROC, &state->processes);
	getrlimit(RLIMIT_NOFILE, &state->open_files);
}

void verify_open(void)
{
	read_state(&initial);
}

static bool has_processes(void)
{
	DIR *proc = opendir("/proc");
	bool found = proc == NULL; /* without /proc we cannot know */

	for (struct dirent *entry; proc && !found && (entry = readdir(proc));)
		found = atoi(entry->d_name) > 1;
	if (proc)
		closedir(proc);
	return found;
}

/* The first line of each is a header. */
static bool has_ipc_objects(void)
{
	static const char *const lists[] = {"/proc/sysvipc/shm", "/proc/sysvipc/sem", "/proc/sysvipc/msg"};
	char text[512];

	for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
		ssize_t size = read_file(AT_FDCWD, lists[i], text, sizeof text);
		const char *end = size > 0 ? memchr(text, '\n', (size_t)size) : NULL;
		if (end && end + 1 < text + size)
			return true;
	}
	return false;
}

/* As the kernel counts for this network namespace. */
static bool has_sockets(void)
{
	char text[64] = "";
	const char *intro = "sockets: used ";

	return read_file(AT_FDCWD, "/proc/thread-self/net/sockstat", text, sizeof text) < 0 ||
	       strncmp(text, intro, strlen(intro)) != 0 || atol(text + strlen(intro)) != 0;
}

static bool environment_changed(void)
{
	struct utsname name;
	char directory[64];
	mode_t mask = umask(022);

	return mask != 022 || !getcwd(directory, sizeof directory) || strcmp(directory, "/workspace") != 0 ||
	       (!(host.without & WALL_NAMESPACES) &&
		(uname(&name) < 0 || strcmp(name.nodename, "sandbox") != 0));
}

static void append_if(char *text, size_t size, bool found, const char *what)
{
	size_t used = strlen(text);

	if (found)
		snprintf(text + used, size - used, "%s%s", used ? ", " : "", what);
}

int verify_all(uint32_t id, const char *payload, size_t size)
{
	struct state current = {0};
	char text[128] = "";
	uint32_t offline;
	bool isolated = !(host.without & WALL_NAMESPACES); /* else the host's own objects would show */

	if (size != sizeof offline)
		return -EPROTO;
	memcpy(&offline, payload, sizeof offline);
	read_state(&current);
	append_if(text, sizeof text, has_processes(), "processes");
	append_if(text, sizeof text, current.files != initial.files || current.blocks != initial.blocks, "files");
	append_if(text, sizeof text, isolated && has_ipc_objects(), "shared memory or other System V IPC");
	append_if(text, sizeof text, isolated && offline && has_sockets(), "sockets");
	append_if(text, sizeof text, environment_changed(), "umask, working directory or host name");
	append_if(text, sizeof text,
	     memcmp(&current.processes, &initial.processes, sizeof current.processes) != 0 ||
		     memcmp(&current.open_files, &initial.open_files, sizeof current.open_files) != 0,
	     "limits");
	int32_t error = text[0] ? EBUSY : 0;
	outbox_frame(FRAME_DONE, 0, id, &error, sizeof error, text, strlen(text));
	return 0;
}
