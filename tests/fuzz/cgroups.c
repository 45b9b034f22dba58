/* Discovery of control groups. The input is the text of /proc/self/mountinfo, a NUL, and that of /proc/self/cgroup. */
#include "launcher/cgroup.c"
#include "jail.h"

#include <sys/syscall.h>

#define LARGEST 8000

static int mark; /* later descriptors are ours to close */

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	jail_enter();
	mark = open(".", O_PATH | O_CLOEXEC);
	host.rootless = true; /* so that it mounts nothing */
	return 0;
}

/* Directories for version 1 and version 2, as the seeds name them. */
static void make_groups(void)
{
	static const char *const directories[] = {"v1", "v1/ours", "v2", "v2/ours"};

	for (unsigned i = 0; i < sizeof directories / sizeof *directories; i++)
		mkdir(directories[i], 0755);
	jail_file("v2/cgroup.subtree_control", "cpu memory pids\n", 16);
	jail_file("v2/ours/cgroup.procs", "", 0);
	jail_file("v2/cgroup.procs", "", 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static char text[LARGEST + 2];

	if (size > LARGEST)
		return 0;
	memcpy(text, data, size);
	text[size] = text[size + 1] = 0;
	make_groups();
	find_hierarchies(text, text + strlen(text) + 1);
	/* On version 2 all three are the same descriptor. */
	syscall(SYS_close_range, mark + 1, ~0u, 0);
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		parents[kind] = -1;
	is_v2 = false;
	jail_empty();
	return 0;
}
