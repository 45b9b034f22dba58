/* What a sandbox needs and can be made beforehand: a range of user ids, a network, a control group, and a
 * process that waits (parked.h). */
#ifndef DUTYFREE_SLOT_H
#define DUTYFREE_SLOT_H

#include "launcher/cgroup.h"

#include <stdbool.h>
#include <sys/types.h>

struct slot {
	struct slot *next;
	unsigned number;
	unsigned first_id;  /* what is user 0 inside is this one outside */
	unsigned maker;     /* who made the namespace, as the launcher sees it */
	int user_namespace; /* maps 0… to first_id… */
	int netns;        /* a namespace with nothing but a loopback */
	struct cgroup cgroup;
	/* The process that waits to be its sandbox (parked.h), or is; pid 0 if there is none. */
	pid_t pid;
	int pidfd, socket;
};

int slot_open(int proc);                 /* 0 or -errno */
struct slot *slot_take(void);            /* made now if none lies ready; NULL with errno */
struct slot *slot_create(void);            /* likewise, one that nobody has used, without a process */
void slot_return(struct slot *slot);     /* its sandbox is gone */
void slot_destroy(struct slot *slot);    /* it shall not be used again */
int slot_has_message_queues(const struct slot *slot); /* of POSIX, in queues of its sandbox: 1, 0 or -errno */
unsigned slot_count(void);
bool slot_needs_parked(unsigned wanted);        /* of slots, or of processes that wait in them */
int slot_prepare(unsigned wanted);       /* make one more of what is missing: 0 or -errno */
void slot_kill_parked(void);                 /* ends all processes that wait: others are needed */

#endif
