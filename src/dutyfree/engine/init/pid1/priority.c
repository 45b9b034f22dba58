/* CPU priority: a sandbox that has computed for a while yields to those that have just started a command.
 *
 * Its control group gets a twentieth of its CPU weight until its next command, and its processes get long time slices:
 * the scheduler then lets a waking process with a shorter slice preempt them. Sandboxes that all compute share the CPU
 * as before; none starves. */
#include "launcher/host.h"
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

#define DEMOTE_AFTER_NS 30000000u /* nanoseconds of computing */
#define SLICE_NS 10000000u        /* nanoseconds; longer than the kernel's default of a few milliseconds */

static const char *weight_full = "1024", *weight_demoted = "51", *weight_background = "2";
static bool armed, demoted, background;
static uint64_t started;

/* Children inherit it. Kernels before 6.12 ignore it, with little loss. */
static void set_long_slice(pid_t thread)
{
	/* struct sched_attr; <linux/sched/types.h> conflicts with C libraries */
	struct {
		uint32_t size, policy;
		uint64_t flags;
		int32_t nice;
		uint32_t priority;
		uint64_t runtime, deadline, period;
	} attributes = {.size = 48, .runtime = SLICE_NS};

	syscall(SYS_sched_setattr, thread, &attributes, 0, seccomp_token[0], seccomp_token[1]);
}

static void set_long_slices(void)
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
				set_long_slice(atoi(thread->d_name));
		if (threads)
			closedir(threads);
	}
	if (proc)
		closedir(proc);
}

void priority_open(bool is_v2)
{
	if (is_v2) {
		weight_full = "100";
		weight_demoted = "5";
		weight_background = "1";
	}
}

static void set_weight(const char *weight)
{
	/* It is /dev/null on hosts without a CPU controller. */
	if (write(WEIGHT_FD, weight, strlen(weight)) < 0)
		return;
	demoted = weight == weight_demoted;
}

void priority_begin(uint64_t time)
{
	started = time;
	/* The runtime of a guest shares the CPU. */
	armed = !is_guest && !(host.without & WALL_CPU_PRIORITY);
	if (demoted)
		set_weight(weight_full);
}

int priority_background(const char *payload, size_t size)
{
	uint32_t enabled;

	if (size != sizeof enabled)
		return -EPROTO;
	memcpy(&enabled, payload, sizeof enabled);
	background = enabled;
	set_weight(background ? weight_background : weight_full);
	return 0;
}

uint64_t priority_next(void)
{
	return armed ? started + DEMOTE_AFTER_NS : UINT64_MAX;
}

void priority_update(bool running)
{
	if (!armed || now() < started + DEMOTE_AFTER_NS)
		return;
	armed = false;
	/* Background processes of a command may compute too. */
	if (running || kill(-1, 0) == 0) {
		if (!background)
			set_weight(weight_demoted);
		set_long_slices();
	}
}
