/* What this host lets the launcher do, found once at its start: everything else asks here. */
#ifndef DUTYFREE_HOST_H
#define DUTYFREE_HOST_H

#include <stdbool.h>
#include <stddef.h>

#define IDS 65536u /* that a sandbox has, where there are so many */

struct host {
	bool rootless; /* root in a user namespace only: no mapped mounts, no devices, no way back to the host's */
	bool own_userns;  /* that namespace is our own, made for the purpose */
	bool can_drop_groups;   /* whether groups can be left */
	unsigned ids;  /* of a sandbox */
};

extern struct host host;

/* Without the rights to make sandboxes, enter a user namespace that gives them: 0 or -errno. */
int host_enter(void);
void host_describe(char *text, size_t size);

#endif
