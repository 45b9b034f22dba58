/* The launcher's own root: a small private file system that holds the layers of all sandboxes.
 *
 *   /l/N   layer N, read-only      /dev    the devices that all sandboxes have
 *   /up    for a sandbox's own     /mask   an empty file and an empty directory
 *                                  /new    for its root while it is put together
 *                                  /box    for its /proc and /dev until then
 *   /proc  the host's, without root only; a sandbox removes it once it has its own
 */
#ifndef DUTYFREE_LAYERS_H
#define DUTYFREE_LAYERS_H

#include <stdbool.h>
#include <stdint.h>

int layers_open(int proc);              /* leaves the host's files: 0 or -errno */
int layer_add_host(const char *path);    /* the layer's number or -errno */
int layer_add_scratch(int *directory);      /* likewise; the directory is to be filled and closed */
int layer_add_mount(int mount);          /* of a detached one, which is taken: likewise */
bool layers_clone_detached(void);                /* whether layers of mounts need not be mounted here */
int layer_detached_fd(uint32_t number);  /* of one that is not; -1 of another */
int layer_open(uint32_t number);        /* its directory: a descriptor or -errno */
int layer_remove(uint32_t number);
void layer_path(char *path, uint32_t number);
#define LAYER_PATH 16

#endif
