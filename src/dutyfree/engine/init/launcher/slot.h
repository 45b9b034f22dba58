/* A slot: what a sandbox needs and the launcher can make in advance. A range of user ids, a user namespace, a network
 * namespace, a control group, and a parked process (parked.h). */
#pragma once

#include "launcher/cgroup.h"

#include <stdbool.h>
#include <sys/types.h>

struct slot {
	struct slot *next;
	unsigned number;
	unsigned first_id;  /* the host's id of user 0 in the sandbox */
	unsigned creator;   /* the id that created the user namespace, as the launcher sees it */
	int user_namespace; /* maps 0… to first_id… */
	int netns;          /* network namespace with only a loopback */
	struct cgroup cgroup;
	/* Its parked process, or PID 1 of its sandbox; pid 0 if there is none. */
	pid_t pid;
	int pidfd, socket;
	int keeper; /* to PID 1, for the socket of a new owner (keep.c); -1 without */
};

int slot_open(int proc);                              /* 0 or -errno */
struct slot *slot_take(void);                         /* creates one if none is prepared; NULL with errno */
struct slot *slot_create(void);                       /* new, without a parked process; NULL with errno */
void slot_return(struct slot *slot);                  /* its sandbox has ended: reuse it */
void slot_destroy(struct slot *slot);                 /* do not reuse it */
int slot_open_inside(const struct slot *slot, const char *path); /* a directory in its sandbox: O_PATH or -errno */
bool slot_shares_memory(const struct slot *slot);      /* whether /dev/shm of its sandbox has files */
int slot_has_message_queues(const struct slot *slot); /* whether its sandbox has POSIX message queues: 1, 0 or -errno */
unsigned slot_count(void);
bool slot_needs_parked(unsigned target); /* fewer parked processes than wanted */
int slot_prepare(unsigned target);       /* create one slot or one parked process: 0 or -errno */
void slot_kill_parked(void);             /* kill all parked processes: they lack a new layer, or hold an old one */
