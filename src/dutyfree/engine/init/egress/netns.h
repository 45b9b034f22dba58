/* The way out of a sandbox's network, from the launcher's side.
 *
 * The sandbox keeps a network namespace with nothing but a loopback. To open it, TCP to every address is
 * routed to that loopback and, by a program at the kernel's lookup of sockets, ends in one listening
 * socket, whoever it was meant for. That socket is handed to the egress process (egress.h): it finds in
 * the socket's own name where a connection was meant to go. Neither the firewall nor the routes of the
 * host are touched, and nothing is sent by the sandbox into the host's network.
 */
#ifndef DUTYFREE_NETWORK_H
#define DUTYFREE_NETWORK_H

#include <stdbool.h>
#include <stdint.h>

/* Addresses in a sandbox's network, of IPv4, in the host's order. The first two are link-local: no address
 * outside, which a sandbox could want, is hidden by them. */
#define ADDRESS_RESOLVER 0xa9fe0101u /* 169.254.1.1: names are asked for here, by UDP */
#define ADDRESS_HOST 0xa9fe0102u     /* 169.254.1.2: stands for the host's loopback */
#define ADDRESS_SELF 0xc6120001u     /* 198.18.0.1: the sandbox itself */
#define SELF_FIRST 0xfd64u           /* and of IPv6: fd64:7574:7966::1 */
#define SELF_SECOND 0x7574u
#define SELF_THIRD 0x7966u

/* What the egress process gets of a sandbox; the last keeps the program in place. */
enum { EGRESS_FD_LISTENER, EGRESS_FD_RESOLVER, EGRESS_FD_PROGRAM, EGRESS_FDS };

int netns_prepare(int netns);                   /* once, with the host's: 0 or -errno */
int netns_open(int netns, int fds[EGRESS_FDS]);    /* 0 or -errno */
void netns_close(int netns);                    /* no packet leaves any more */

/* A socket in that network, or in ours with -1, connecting to a server in there: its descriptor or -errno. */
int netns_connect(int netns, uint16_t port, int ipv6);

/* --- Its parts ---------------------------------------------------------------------------------------- */

int routes_configure(bool open, bool ipv6);    /* in the network that we are in, or take them away: 0 or -errno */
int sk_lookup_attach(int netns, int listener);    /* a descriptor that keeps the program in place, or -errno */

#endif
