/* Control groups of version 2, where a process is in one group with all its threads, a group with children
 * holds no processes itself, and what is controlled is decided by the group above. */
#ifndef DUTYFREE_UNIFIED_H
#define DUTYFREE_UNIFIED_H

#include <stdbool.h>

/* The nearest group, from our own upwards, whose children can be limited: its directory or -1. */
int cgroup_v2_find_parent(const char *point, const char *below);
bool cgroup_v2_has_controller(int group, int kind);

/* Make of the launcher's group what follows: 0 or -errno. */
int cgroup_v2_split(int group, int proc);
extern int cgroup_v2_inits;     /* the group of every init, which is outside of what it runs */
extern int cgroup_v2_namespace; /* in which that group and those of the sandboxes lie below the root */

#endif
