/* Processes that the memory limit killed, as our control group counts them: in any part of the sandbox, whoever
 * started them. The file is opened by the launcher; where memory is not limited it is /dev/null, and empty. */
#define _GNU_SOURCE
#include "pid1/init.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint64_t reported;

/* memory.events on version 2 of control groups, memory.oom_control on version 1: a word and a number per line. */
static uint64_t read_count(void)
{
	char text[512];
	ssize_t size = pread(OOM_FD, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	const char *line = strstr(text, "oom_kill ");
	return line ? strtoull(line + strlen("oom_kill "), NULL, 10) : 0;
}

/* The group was another sandbox's before. */
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
