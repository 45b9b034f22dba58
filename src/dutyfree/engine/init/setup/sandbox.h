/* From a fresh clone of the launcher to PID 1 of a sandbox. */
#ifndef DUTYFREE_SANDBOX_H
#define DUTYFREE_SANDBOX_H

#include "protocol.h"
#include "launcher/slot.h"

void setup_prepare(int proc); /* looks at the host's /proc, once */

/* A file system for what a sandbox writes: a descriptor of a detached mount, for it, or -errno; and another one
 * to be kept. */
int upper_create(const struct create *wanted, int *kept);

/* Runs in the clone, never returns: prepares what all sandboxes have alike, and waits for its order. */
_Noreturn void setup_run(const struct slot *slot);

#endif
