/* Limits: one control group (cgroup) for each slot, below the launcher's own. Works with cgroup v1, v2 and both at
 * once; cgroup_v2.h has what only v2 needs. */
#pragma once

#include "protocol.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define CGROUP_WEIGHT_V1 "1024" /* default CPU weight: cpu.shares on v1, cpu.weight on v2 */
#define CGROUP_WEIGHT_V2 "100"

enum { CGROUP_CPU, CGROUP_MEMORY, CGROUP_PIDS, CGROUP_KINDS };

struct cgroup {
	unsigned number;
	uint64_t memory, pids, cpu_quota; /* limits in force, 0 for none */
	int v2_dir;                       /* v2: its directory, to clone processes into; else -1 */
	int freezer;                      /* v1 host with v2 for the freezer: its directory there; else -1 */
	int tasks[CGROUP_KINDS];          /* v1: its tasks files, write "0" to enter; -1 without the controller */
};

/* Find the cgroup hierarchies in the host's /proc, create our group, remove groups of launchers that were killed. 0 or
 * -errno. */
int cgroup_open(int proc);
void cgroup_describe(char *text, size_t size);
int cgroup_create(struct cgroup *group, unsigned number, unsigned owner); /* owner: the id of its init */
int cgroup_set_limits(struct cgroup *group, const struct create *spec);
ssize_t cgroup_read(const struct cgroup *group, int kind, const char *file, char *text, size_t size);
bool cgroup_is_v2(void); /* v2 has other file names */
int cgroup_open_weight(const struct cgroup *group); /* a descriptor to write the CPU weight to, or -errno */
int cgroup_open_oom(const struct cgroup *group); /* a descriptor to read the OOM kill count from, or -errno */
int cgroup_reset_weight(struct cgroup *group); /* set the CPU weight back to the default: 0 or -errno */
void cgroup_close_fds(struct cgroup *group); /* close its descriptors while a sandbox runs in it */
int cgroup_reopen(struct cgroup *group); /* open them again for the next sandbox: 0 or -errno */
bool cgroup_can_freeze(void); /* whether this host has a freezer */
bool cgroup_freezer_has_init(void); /* whether init is in the frozen group too */
int cgroup_freeze(const struct cgroup *group, bool frozen); /* takes effect later: see cgroup_is_frozen */
int cgroup_open_events(const struct cgroup *group); /* cgroup.events, to poll for EPOLLPRI: a descriptor or -errno */
bool cgroup_is_frozen(int events);
int cgroup_join(void); /* v1: move this process into the memory group of all sandboxes: 0 or -errno */
void cgroup_remove(struct cgroup *group);
void cgroup_close(void);

extern const char *const cgroup_names[CGROUP_KINDS];
bool list_contains(const char *list, const char *word, char separator);
