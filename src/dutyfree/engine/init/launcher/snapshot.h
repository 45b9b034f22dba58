/* Snapshots: the files that a sandbox has written become layers. Either move them, if the sandbox will not write any
 * more, or copy them. */
#pragma once

#include "protocol.h"

#include <stdbool.h>

/* New layers and their size. */
struct snapshot_layers {
	struct snapshot_usage usage;
	uint32_t number[TREES_MAX];
	uint32_t count;
};

/* At once: 0 or -errno. `force`: even if a copy is cheaper. */
int snapshot_move(int *upper, uint32_t trees, bool force, struct snapshot_layers *layers);

/* These start a job, a process of its own, and return its number or -errno. A merge goes into a directory, or into a new
 * layer if target < 0. `disk` is the template for layers on disk, 0 for layers in memory. */
int snapshot_copy(int upper, uint32_t trees, uint64_t disk, uint32_t serial);
int snapshot_merge(const struct merge *spec, int target, uint32_t serial);

int snapshot_pidfd(int number); /* readable when the job has ended */
/* Collect the result of an ended job: 0 or -errno. */
int snapshot_finish(int number, struct snapshot_layers *layers, uint32_t *serial);
void snapshot_kill_all(void);
