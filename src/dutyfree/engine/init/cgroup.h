/* Limits: one control group for each slot, below one for the launcher. Versions 1, 2, and both at once. */
#ifndef DUTYFREE_CGROUP_H
#define DUTYFREE_CGROUP_H

#include "protocol.h"

#include <stdbool.h>
#include <stddef.h>

enum { CGROUP_CPU, CGROUP_MEMORY, CGROUP_PIDS, CGROUP_KINDS };
/* Version 2 can freeze, whether or not it has the controllers too. */
enum { CGROUP_FREEZER = CGROUP_KINDS, CGROUP_PLACES };

struct cgroup {
	unsigned number;
	uint64_t memory, pids, cpu_quota; /* as they stand */
	bool unified;                     /* its limits are version 2's */
	int directory;                    /* on version 2, with which it is frozen; -1 where there is none */
	int tasks[CGROUP_KINDS];          /* on version 1: write 0 here to enter; -1 where there is none */
};

/* Finds the hierarchies from the host's /proc, and sweeps after launchers that were killed. */
int cgroup_open(int proc);
void cgroup_describe(char *text, size_t size);
int cgroup_make(struct cgroup *group, unsigned number);
int cgroup_limit(struct cgroup *group, const struct create *wanted);
int cgroup_freeze(struct cgroup *group, bool frozen);  /* which takes a moment */
int cgroup_events(struct cgroup *group);              /* to poll for EPOLLPRI: a descriptor or -errno */
bool cgroup_is_frozen(int events);
int cgroup_weight(const struct cgroup *group); /* a descriptor to write its weight to, or -errno */
void cgroup_restore(struct cgroup *group);     /* what its sandbox may have changed */
void cgroup_remove(struct cgroup *group);
void cgroup_close(void);

#endif
