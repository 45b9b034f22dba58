/* A sandbox that has computed for long yields to those that have just begun.
 *
 * Its control group then has a twentieth of its weight, until its next command begins, and its processes
 * ask for long turns: the kernel lets whoever wakes up and wants a shorter one interrupt them. Between
 * sandboxes that all compute nothing changes, and none is ever starved. */
#define _GNU_SOURCE
#include "pid1/init.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LONG 30000000u /* nanoseconds */
#define TURN 10000000u /* likewise: longer than the kernel's own, a few milliseconds */

static const char *full = "1024", *little = "51", *least = "2";
static bool watching, demoted, yielding;
static uint64_t since;

/* Inherited by what is forked. Kernels before 6.12 know of no such wish: little is lost. */
static void ask_for_long_turns(pid_t thread)
{
	/* struct sched_attr of <linux/sched/types.h>, which collides with what C libraries have */
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime, deadline, period;
	} turns = {.size = 48, .runtime = TURN};

	syscall(SYS_sched_setattr, thread, &turns, 0, seccomp_pass[0], seccomp_pass[1]);
}

static void lengthen_turns(void)
{
	char path[32];
	DIR *proc = opendir("/proc");

	for (struct dirent *process; proc && (process = readdir(proc));) {
		if (atoi(process->d_name) <= 1)
			continue;
		snprintf(path, sizeof path, "/proc/%.10s/task", process->d_name);
		DIR *threads = opendir(path);
		for (struct dirent *thread; threads && (thread = readdir(threads));)
			if (atoi(thread->d_name) > 1)
				ask_for_long_turns(atoi(thread->d_name));
		if (threads)
			closedir(threads);
	}
	if (proc)
		closedir(proc);
}

void priority_open(bool unified)
{
	if (unified) {
		full = "100";
		little = "5";
		least = "1";
	}
}

static void weigh(const char *weight)
{
	/* It may be /dev/null: not every host has this control group. */
	if (write(WEIGHT_FD, weight, strlen(weight)) < 0)
		return;
	demoted = weight == little;
}

void priority_begin(uint64_t time)
{
	since = time;
	watching = true;
	if (demoted)
		weigh(full);
}

int priority_give_way(const char *payload, size_t size)
{
	uint32_t wanted;

	if (size != sizeof wanted)
		return -EPROTO;
	memcpy(&wanted, payload, sizeof wanted);
	yielding = wanted;
	weigh(yielding ? least : full);
	return 0;
}

uint64_t priority_next(void)
{
	return watching ? since + LONG : UINT64_MAX;
}

void priority_turn(bool running)
{
	if (!watching || now() < since + LONG)
		return;
	watching = false;
	/* What a command left behind may compute as well. */
	if (running || kill(-1, 0) == 0) {
		if (!yielding)
			weigh(little);
		lengthen_turns();
	}
}
