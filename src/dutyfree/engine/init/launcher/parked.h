/* A process that waits to become a sandbox.
 *
 * It has its own mount, pid, ipc and uts namespaces, the network of its slot, /proc and the devices; what
 * is missing is what the request says: files, limits, a name. Of a clone's time, most has passed. */
#ifndef DUTYFREE_BLANK_H
#define DUTYFREE_BLANK_H

#include "launcher/slot.h"

#define DETACHED_MAX 127 /* with the upper, what one message takes */

/* What it waits for, on what becomes the sandbox's own socket. */
struct activation {
	struct create wanted;
	uint32_t detached; /* descriptors that come with it after the upper: layers with these numbers */
	uint32_t number[DETACHED_MAX];
	char label[LABEL_MAX + 1];
};

int parked_create(struct slot *slot);                              /* 0 or -errno */
int parked_activate(const struct slot *slot, struct activation *activation, int upper); /* likewise: from now on it is a sandbox */
void parked_kill(struct slot *slot);                          /* if there is one: it is gone */

#endif
