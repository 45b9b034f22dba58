/* Merge several overlayfs layers into one, or copy one. It takes long, so it runs in its own process.
 *
 * The result shows what an overlay mount of these layers shows, whatever lies below. Whiteouts, opaque directories,
 * redirects and metacopy files that refer to layers below are kept. Other overlay xattrs are dropped.
 *
 * If the layers below are given too, redirected directories are copied in full instead. The result then works on any
 * lower layers. */
#pragma once

#include <stdbool.h>

#define MERGE_MAX 32 /* same as LAYERS_MAX; protocol.h cannot be included with search.h */

/* Limits for a result on disk, as for image layers (engine/images): code that measures, packs or removes it later need
 * not handle deeper trees or longer paths. */
#define MERGE_DEPTH_MAX 200
#define MERGE_PATH_MAX 3000

/* Merge the first `own` directories, uppermost first, into an empty one: 0 or -errno. `on_disk`: apply the limits. */
int overlay_merge(const int *layers, int count, int own, int target, bool on_disk);
