/* How a clone of the launcher gets its own descriptors and none of the others.
 *
 * The clone shares the launcher's descriptor table (CLONE_FILES), which may be long. It then unshares only the part
 * below HANDED_END, so the cost does not grow with the number of sandboxes. Until then the launcher does not touch that
 * part. */
#pragma once

#include "launcher/slot.h"

enum {
	HANDED_FIRST = 10,
	HANDED_SOCKET = HANDED_FIRST,
	HANDED_USER,
	HANDED_NETWORK,
	HANDED_PAYLOAD,
	HANDED_GROUPS,
	HANDED_WEIGHT,
	HANDED_OOM,
	HANDED_KEEPER,
	HANDED_TASKS,
	HANDED_END = HANDED_TASKS + CGROUP_KINDS,
};

/* In the launcher: */
int handover_open(int *owner);                           /* move the owner's socket above HANDED_END: 0 or -errno */
void handover_send(const struct slot *slot, int socket, int keeper); /* before the clone */
void handover_finish(int pidfd);                         /* after the clone: wait until it has its descriptors */

/* In the clone: 0 or -errno. `handed` becomes a copy of the slot with the clone's own descriptor numbers. */
int handover_receive(const struct slot *slot, struct slot *handed);
