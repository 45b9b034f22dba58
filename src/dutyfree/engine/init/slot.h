/* What a sandbox needs and can be made beforehand: a range of user ids, a network, a control group. */
#ifndef DUTYFREE_SLOT_H
#define DUTYFREE_SLOT_H

#include "cgroup.h"

struct slot {
	struct slot *next;
	unsigned number;
	unsigned first_id;  /* what is user 0 inside is this one outside */
	int user_namespace; /* maps 0… to first_id… */
	int network;        /* a namespace with nothing but a loopback */
	struct cgroup cgroup;
};

int slot_open(int proc);                 /* 0 or -errno */
struct slot *slot_take(void);            /* made now if none lies ready; NULL with errno */
struct slot *slot_make(void);            /* likewise, one that nobody has used */
void slot_return(struct slot *slot);     /* its sandbox is gone */
void slot_discard(struct slot *slot);    /* it shall not be used again */
unsigned slot_ready(void);
int slot_prepare(void);                  /* make one more ready: 0 or -errno */

#endif
