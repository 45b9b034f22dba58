/* What only cgroup v2 needs. There a process is in one group with all its threads, a group with children holds no
 * processes, and the parent group enables the controllers of its children. */
#pragma once

#include <stdbool.h>

/* The nearest group, from our own upwards, that can limit its children: its directory, or -1. */
int cgroup_v2_find_parent(const char *point, const char *below);
bool cgroup_v2_has_controller(int group, int kind);

/* Split the launcher's group into a group for all inits and one for each sandbox: 0 or -errno. */
int cgroup_v2_split(int group, int proc);
extern int cgroup_v2_inits;     /* the group of all inits, outside of their sandboxes' groups */
extern int cgroup_v2_namespace; /* a cgroup namespace whose root is the launcher's group */
