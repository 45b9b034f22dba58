/* Writable file systems on disk: each is an ext4 image for one sandbox, or for the layers of one snapshot.
 *
 * An image is a file without a name, in a directory of the owner. Its blocks are allocated when it is made, so a disk
 * that fills up later cannot make its writes fail. It starts as a copy of a template that the owner has formatted. A
 * loop device with autoclear attaches it. The mount is the only reference: when it goes, also because all processes
 * were killed, the kernel frees the loop device and then the file.
 *
 * Making an image and unmounting one wait for the disk. Two helper processes do that, so that the launcher never waits:
 * one makes images in advance, the other one unmounts. */
#pragma once

#include "protocol.h"

#include <stdbool.h>

int disk_open(int directory);                /* where images are made: 0 or -errno; takes the descriptor */
/* Takes the descriptor. It makes a first image, and replies to the owner when that is done. */
void disk_add_template(int image, uint64_t size, uint32_t serial);
bool disk_in_use(void);
bool disk_has_template(uint64_t size);

/* Take a prepared file system: a detached mount; or -EAGAIN, and disk_made() will be called; or -errno. It contains
 * the directories u0, w0, … of TREES_MAX trees. */
int disk_take(uint64_t size);
uint64_t disk_copy_size(uint64_t most, const struct snapshot_usage *usage); /* the smallest that a copy fits in */
int disk_make_now(uint64_t size); /* make one in this process, which may wait for the disk: a detached mount or -errno */

/* Give a detached mount back. `unused`: nothing else uses its files, so remove them instead of writing them to disk. */
void disk_dispose(int *mount, bool unused);
void disk_dispose_overlay(int *overlay); /* of a file system that was given back before: close it after that */
void disk_trim(int mount); /* it has become layers: free what it has reserved and does not use */
void disk_close(void); /* end the helpers, once they have unmounted everything */

void disk_set_ready(unsigned target); /* how many to keep prepared, of the size that was used last */
bool disk_lacks_ready(void);
void disk_prepare(void);              /* order what is missing */
void disk_replied(void);              /* the helper has made one, or failed */
void disk_disposed(void);             /* the other helper has unmounted one */
void disk_send_disposals(void);       /* the other helper has room for more, or has died */

bool disk_is_image(int mount, struct snapshot_usage *empty); /* whether it is one; and what an empty one counts */

/* sandboxes.c: try the waiting requests again. With an error, the first one that waits for this size has failed. */
void sandbox_disk_made(uint64_t size, int error, const char *step);
