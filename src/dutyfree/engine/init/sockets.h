/* Sockets that init makes for those who ask.
 *
 * What lies unread in sockets for datagrams and for netlink is the kernel's memory, counted for no sandbox: a
 * few thousand of them would take all that the host has. So the filter on system calls (seccomp.c) lets
 * nobody make one. Init is asked, and makes it, as long as the sandbox's network has few. */
#ifndef DUTYFREE_SOCKETS_H
#define DUTYFREE_SOCKETS_H

#include <stdbool.h>

/* Where it is asked; -1 for nowhere. In a network that is shared with the host there is nothing to count. */
void sockets_open(int listener, bool shared);
int sockets_listener(void); /* to be watched */
void sockets_serve(void);   /* one question, or none */

#endif
