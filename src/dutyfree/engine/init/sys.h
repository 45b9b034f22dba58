/* System calls that the C library lacks, and small helpers that all rooms use. */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Close the descriptor when the variable leaves its scope. */
#define AUTOCLOSE __attribute__((cleanup(close_at)))

/* Another runtime made this sandbox (setup/guest.c). Frames come on one descriptor and go to another, without
 * descriptors beside them; limits, capabilities and the seccomp filter are those of that runtime. */
extern bool is_guest;

/* A guest that is PID 1 of a virtual machine (setup/machine.c). */
extern bool is_machine;

/* A guest on a whole machine (setup/remote.c). Without a pid namespace it shares the process numbers with others: then
 * only its descendants are its own. */
extern bool is_remote, shares_pids;

void close_at(int *fd);
void close_fd(int *fd); /* and set it to -1 */
void close_from(int first); /* this descriptor and all above it */
uint64_t now(void);     /* CLOCK_MONOTONIC, nanoseconds */

/* 0 or -errno. */
int write_file(int dir, const char *path, const char *text);
ssize_t read_file(int dir, const char *path, char *buffer, size_t size);
int write_all(int fd, const void *data, size_t size);

/* fs.suid_dumpable = 1 makes processes dumpable after setuid. A command shares init's memory until its exec, so a
 * sandbox could read it. */
bool suid_dumpable_is_on(void);

/* Like openat, but it refuses magic links such as /proc/self/fd/N with ELOOP, because init's own descriptors must not
 * be opened through them. `resolve` adds flags of openat2. A descriptor or -errno. */
int open_no_magiclinks(int dir, const char *path, int flags, mode_t mode, uint64_t resolve);

#define MESSAGE_FDS 128

/* Send one message with up to MESSAGE_FDS descriptors (SCM_RIGHTS): 0 or -errno. */
int send_message(int socket, const void *a, size_t a_size, const void *b, size_t b_size, const int *fds, int count);
/* Without waiting: -EAGAIN if the socket has no room. */
int send_message_now(int socket, const void *data, size_t size, int fd);

/* Receive one message, and at most `room` ≤ MESSAGE_FDS descriptors, which are close-on-exec. Returns as recvmsg does. */
ssize_t receive_message(int socket, void *data, size_t size, int flags, int *fds, size_t room, size_t *count);
/* Receive one message of exactly this size, and the descriptor with it, or -1: 0, -EPIPE at the end, or -errno. */
int receive_fd(int socket, void *message, size_t size, int *fd);

/* The new mount API (fsopen, open_tree, move_mount): descriptors or -errno. An option without a value is a flag. */
int mount_new(const char *type, const char *const options[][2], unsigned attributes);
int mount_clone(int dir, const char *path, bool recursive);
int mount_attach(int mount, const char *path);
int mount_restrict(int mount, uint64_t attributes, int user_namespace); /* an idmapped mount if user_namespace ≥ 0 */

/* Start a child as vfork does: it shares our memory, and we wait until it calls exec or exits. It starts in the given
 * cgroup of version 2, or in ours with -1. Returns its pid or -errno. */
pid_t spawn_child(int (*body)(void *), void *argument, int group);

/* The same, and it shares our descriptors. Returns after it has exited: 0 or minus its exit status. */
int run_child(int (*body)(void *), void *argument, int group);

/* fork() into a cgroup of version 2, or into ours with -1. */
pid_t fork_into(int group);

int pidfd_signal(int pidfd, int signal);
