/* Several layers become one, or one is copied: in a process of its own, for it takes its time.
 *
 * What an overlay of the layers shows, over whatever lies below them: whiteouts and opaque directories stay, and
 * so do references to what is only below (redirects, metadata alone), as the overlay itself would follow them.
 * Of what the overlay notes nothing else is taken over.
 *
 * With layers below the merged ones, what is referred to there is copied instead: the outcome then means the
 * same wherever it lies. */
#ifndef DUTYFREE_MERGE_H
#define DUTYFREE_MERGE_H

#include <stdbool.h>

#define MERGE_MAX 32 /* as LAYERS_MAX, whose header search.h does not bear */

/* What is to lie on a disk lies no deeper, and under no longer path: as in layers of images (images/names.py).
 * Whoever walks through it later, to measure, pack or remove it, need not be prepared for more. */
#define MERGE_DEPTH_MAX 200
#define MERGE_PATH_MAX 3000

/* The first `own` of the directories, uppermost first, into an empty one: 0 or -errno. `lasts`: on a disk. */
int overlay_merge(const int *layers, int count, int own, int target, bool on_disk);

#endif
