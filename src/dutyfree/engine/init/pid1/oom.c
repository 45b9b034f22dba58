/* OOM kills: how many processes the memory limit has killed, anywhere in the sandbox, as its control group counts them.
 * The launcher opens the file; without a memory limit it is /dev/null. */
#include "pid1/init.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t reported;

/* memory.events on cgroup v2, memory.oom_control on v1, /proc/vmstat in a virtual machine: "oom_kill NUMBER" on one
 * line. */
static uint64_t read_count(void)
{
	char text[8192];
	ssize_t size = pread(OOM_FD, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	const char *line = strstr(text, "oom_kill ");
	return line ? strtoull(line + strlen("oom_kill "), NULL, 10) : 0;
}

/* The group may have had a sandbox before. */
void oom_open(void)
{
	reported = read_count();
}

uint64_t oom_reported(void)
{
	return reported;
}

bool oom_report(uint64_t since)
{
	uint64_t now = read_count();

	if (now > reported)
		reported = now;
	return now > since;
}
