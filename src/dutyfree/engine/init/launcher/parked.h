/* A parked process: a clone that waits to become PID 1 of a sandbox.
 *
 * It has its own mount, pid, ipc and uts namespaces, /proc and devices. The request adds the rest: files, limits,
 * network, name. Most of the time that a sandbox takes has passed by then. */
#pragma once

#include "launcher/slot.h"

#define DETACHED_MAX 127 /* with the upper, as many as one message carries */

/* The message that turns it into a sandbox. It arrives on the socket that the owner gets later. */
struct activation {
	struct create spec;
	uint32_t detached; /* descriptors after the upper: layers with these numbers */
	uint32_t number[DETACHED_MAX];
	char label[LABEL_MAX + 1];
};

int parked_create(struct slot *slot); /* 0 or -errno */
/* It becomes a sandbox: 0 or -errno. */
int parked_activate(const struct slot *slot, struct activation *activation, int upper);
void parked_kill(struct slot *slot); /* and wait for its end, if there is one */
