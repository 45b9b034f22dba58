/* The seccomp broker: system calls that init decides one by one, by seccomp user notification.
 *
 * They use kernel memory that no control group counts and that all of the host shares. So init counts them and sets a
 * limit (seccomp.c lists the calls):
 * - socket() for datagrams and netlink: unread data. Init creates the socket itself.
 * - connect(): the other end until someone accepts it, data sent to it, and TIME_WAIT. If the network routes all of
 *   IPv6, also a neighbour entry per destination, which the kernel keeps for about 15 seconds without a limit: after
 *   a burst, connections are delayed.
 * - seccomp(): compiled filters. They live as long as a task uses them, and one task has a limited number: few tasks
 *   have few filters.
 * Init itself may call only socket(), with the token. It would wait for itself in the others. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* listener -1: no broker. In a network shared with the host, sockets are not counted. */
void broker_open(int listener, bool shared);
int broker_listener(void); /* for epoll */
void broker_serve(void);   /* handle one notification, if there is one */
/* When the next notification may be handled; UINT64_MAX: at once. */
uint64_t broker_next(void);
