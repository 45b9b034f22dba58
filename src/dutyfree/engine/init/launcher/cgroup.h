/* Limits: one control group for each slot, below one for the launcher. Versions 1, 2, and both at once. */
#ifndef DUTYFREE_CGROUP_H
#define DUTYFREE_CGROUP_H

#include "protocol.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define CGROUP_WEIGHT_V1 "1024" /* the weight of a sandbox that yields to nobody */
#define CGROUP_WEIGHT_V2 "100"

enum { CGROUP_CPU, CGROUP_MEMORY, CGROUP_PIDS, CGROUP_KINDS };

struct cgroup {
	unsigned number;
	uint64_t memory, pids, cpu_quota; /* as they stand */
	int v2_dir;                      /* its directory on version 2, for clones into it; -1 otherwise */
	int freezer;                      /* the same beside version 1, where version 2 serves to freeze only */
	int tasks[CGROUP_KINDS];          /* on version 1: write 0 here to enter; -1 where there is none */
};

/* Finds the hierarchies from the host's /proc, and sweeps after launchers that were killed. */
int cgroup_open(int proc);
void cgroup_describe(char *text, size_t size);
int cgroup_create(struct cgroup *group, unsigned number, unsigned owner); /* the id that starts processes in it */
int cgroup_set_limits(struct cgroup *group, const struct create *wanted);
ssize_t cgroup_read(const struct cgroup *group, int kind, const char *file, char *text, size_t size);
bool cgroup_is_v2(void); /* version 2, where files have other names */
int cgroup_open_weight(const struct cgroup *group); /* a descriptor to write its weight to, or -errno */
int cgroup_open_oom(const struct cgroup *group);    /* a descriptor to read its count of killed processes, or -errno */
int cgroup_reset_weight(struct cgroup *group); /* what its sandbox may have changed: 0 or -errno */
void cgroup_close_fds(struct cgroup *group);  /* closes its descriptors, while a sandbox is in it */
int cgroup_reopen(struct cgroup *group); /* for the next one: 0 or -errno */
bool cgroup_can_freeze(void);      /* whether that can be done at all */
bool cgroup_freezer_has_init(void); /* and whether init, too, is in what is frozen */
int cgroup_freeze(const struct cgroup *group, bool frozen); /* which takes a moment */
int cgroup_open_events(const struct cgroup *group); /* to poll for EPOLLPRI: a descriptor or -errno */
bool cgroup_is_frozen(int events);
int cgroup_join(void); /* for what all sandboxes have in common: on version 1, of memory. 0 or -errno */
void cgroup_remove(struct cgroup *group);
void cgroup_close(void);

extern const char *const cgroup_names[CGROUP_KINDS];
bool list_contains(const char *list, const char *word, char separator);

#endif
