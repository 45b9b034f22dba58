/* System calls about which processes of the sandbox ask init.
 *
 * What they use up is the kernel's own, counted for no sandbox but for the whole host, so init counts it
 * and refuses more than a part (seccomp.c says which calls these are):
 * - socket(), for datagrams and netlink: what lies unread in them. Init makes the socket itself.
 * - connect(): the other end, until somebody accepts it, what was sent to it, and what is left after a close. And
 *   in a network that leads to all of IPv6, the kernel's note of each destination (a neighbour of the loopback), which it
 *   keeps for some 15 seconds and without limit: after so many at once, each further one waits for its turn.
 * - seccomp(): what the kernel compiles of a filter. It lives as long as a task that is under it, and there is a
 *   limit to what one task is under: few tasks have few filters.
 * Init itself calls none of them but the first, with the pass: nobody would answer. */
#ifndef DUTYFREE_ASKED_H
#define DUTYFREE_ASKED_H

#include <stdbool.h>
#include <stdint.h>

/* Where it is asked; -1 for nowhere. In a network that is shared with the host there is nothing to count. */
void broker_open(int listener, bool shared);
int broker_listener(void); /* to be watched */
void broker_serve(void);   /* one question, or none */
/* When the next question may be served; UINT64_MAX: at once. */
uint64_t broker_next(void);

#endif
