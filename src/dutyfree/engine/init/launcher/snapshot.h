/* What a sandbox has written becomes layers: as it is, for one that writes no more, or a copy of it. */
#ifndef DUTYFREE_SNAPSHOT_H
#define DUTYFREE_SNAPSHOT_H

#include "protocol.h"

#include <stdbool.h>

/* Numbers of layers, and what they hold. */
struct snapshot_layers {
	struct snapshot_usage usage;
	uint32_t number[TREES_MAX];
	uint32_t count;
};

int snapshot_move(int *upper, uint32_t trees, bool force, struct snapshot_layers *made); /* 0 or -errno */

/* These go on in a process of their own, and are answered when it has ended: its number, or -errno. */
int snapshot_copy(int upper, uint32_t trees, uint32_t serial);
int snapshot_merge(const struct merge *wanted, int target, uint32_t serial); /* into a directory, or a layer */

int snapshot_pidfd(int number);  /* which tells the end of it */
/* It has ended: 0 or -errno, and what came of it. */
int snapshot_finish(int number, struct snapshot_layers *made, uint32_t *serial);
void snapshot_kill_all(void); /* ends all */

#endif
