/* Directories of a sandbox that are no part of its overlay, because a path through an overlay costs more.
 *
 * A plain directory is a bind mount of the overlay's own upper directory, so snapshots contain it like all other files.
 * The mount covers the directory in the overlay: no process can change the same files in two ways. A fixed directory is
 * a bind mount of a layer, read-only as the layer is. */
#pragma once

#include "protocol.h"

#include <stdbool.h>
#include <stdint.h>

bool place_is_valid(const struct place *place);

/* Create the plain directories of tree 0 in /up. Its layers are mounted, its overlay is not. `root` is the host's id of
 * root in the sandbox. */
void places_prepare(const struct create *spec, uint32_t root);

/* Mount all places below /new. Returns those that are no overlay now, as bits. */
uint32_t places_mount(const struct create *spec);
