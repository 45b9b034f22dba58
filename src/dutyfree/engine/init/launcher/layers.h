/* The launcher's own root: a small private file system with the layers of all sandboxes.
 *
 *   /l/N   layer N, read-only            /dev     the devices of all sandboxes
 *   /up    writable file system          /mask    an empty file and an empty directory
 *   /new   root while it is mounted      /parked  /proc and /dev of a parked process
 *   /proc  the host's, rootless only; a parked process unmounts it once it has its own */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int layers_open(int proc);              /* leave the host's files: 0 or -errno */
int layer_add_host(const char *path);   /* from a directory on the host: layer number or -errno */
int layer_add_scratch(int *directory);  /* new and empty: layer number or -errno; fill and close the directory */
int layer_add_mount(int mount);         /* from a detached mount, which it takes: layer number or -errno */
bool layers_clone_detached(void);       /* whether layers can stay detached mounts (Linux 6.15) */
int layer_detached_fd(uint32_t number); /* descriptor of a detached layer, or -1 */
int layer_open(uint32_t number);        /* its directory: a descriptor or -errno */
int layer_hold(uint32_t number, int lock); /* hold this lock as long as the layer exists: 0 or -errno */
int layer_remove(uint32_t number);
void layers_remove_others(const uint32_t *kept, size_t count); /* all layers but these */
void layer_path(char *path, uint32_t number);
#define LAYER_PATH 16
