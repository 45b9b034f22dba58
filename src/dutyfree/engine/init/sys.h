/* System calls that the C library does not have, and the few habits that all files share. */
#ifndef DUTYFREE_SYS_H
#define DUTYFREE_SYS_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Closed when the variable leaves its scope. */
#define AUTOCLOSE __attribute__((cleanup(close_at)))

void close_at(int *fd);
void close_fd(int *fd); /* and make it -1 */
uint64_t now(void);     /* CLOCK_MONOTONIC, nanoseconds */

/* 0 or -errno. */
int write_file(int dir, const char *path, const char *text);
ssize_t read_file(int dir, const char *path, char *buffer, size_t size);
int write_all(int fd, const void *data, size_t size);

/* As openat, but through no descriptor: /proc/self/fd/N, which is ours in what init opens, is a loop (ELOOP).
 * `resolve` is what else openat2 shall refuse. A descriptor or -errno. */
int open_no_magiclinks(int dir, const char *path, int flags, mode_t mode, uint64_t resolve);

#define MESSAGE_FDS 128

/* One message with descriptors, at most so many: 0 or -errno. */
int send_message(int socket, const void *a, size_t a_size, const void *b, size_t b_size, const int *fds, int count);

/* The new mount interface: descriptors or -errno. An option without a value is a flag. */
int mount_new(const char *type, const char *const options[][2], unsigned attributes);
int mount_clone(int dir, const char *path, bool recursive);
int mount_attach(int mount, const char *path);
int mount_restrict(int mount, uint64_t attributes, int user_namespace); /* idmapped if ≥ 0 */

/* A child that shares our memory until its exec, and keeps us waiting until then: its pid or -errno. It is
 * born in a control group of version 2, or where we are with a group of -1. */
pid_t spawn_child(int (*body)(void *), void *argument, int group);

/* Likewise, one that shares our descriptors too, and has done its work when this returns: its exit status. */
int run_child(int (*body)(void *), void *argument, int group);

/* A copy of ourselves, born in a control group: as fork. */
pid_t fork_into(int group);

int pidfd_signal(int pidfd, int signal);

#endif
