/* How a clone gets its descriptors, and none of the launcher's others.
 *
 * It shares the launcher's table, which may be long, and leaves it with a copy of the part below
 * HANDED_END: that costs the same however many sandboxes there are. Until then the launcher touches
 * nothing there.
 */
#ifndef DUTYFREE_HANDOVER_H
#define DUTYFREE_HANDOVER_H

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
	HANDED_TASKS,
	HANDED_END = HANDED_TASKS + CGROUP_KINDS,
};

/* In the launcher. */
int handover_open(int *owner);                             /* moves its socket out of the way: 0 or -errno */
void handover_send(const struct slot *slot, int socket);   /* before the clone */
void handover_finish(int pidfd);                        /* after it: when it has its own */

/* In the clone: 0 or -errno. The slot is then a copy with the descriptors that it was handed. */
int handover_receive(const struct slot *slot, struct slot *handed);

#endif
