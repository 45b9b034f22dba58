/* The launcher's side of a sandbox's network namespace.
 *
 * The namespace has only a loopback. To open it, the launcher routes TCP to all addresses to that loopback (routes.c),
 * and a BPF sk_lookup program gives every connection to one listening socket (sk_lookup.c). The egress process gets
 * that socket. The local address of an accepted connection is the destination that the client asked for. The host's
 * firewall and routes stay as they are, and the sandbox sends no packets into the host's network. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* IPv4 addresses in the sandbox's network, in host byte order. The first two are link-local, so they hide no address
 * that a sandbox could need. */
#define ADDRESS_RESOLVER 0xa9fe0101u /* 169.254.1.1: DNS by UDP */
#define ADDRESS_HOST 0xa9fe0102u     /* 169.254.1.2: the host's loopback */
#define ADDRESS_SELF 0xc6120001u     /* 198.18.0.1: the sandbox itself */
#define SELF_FIRST 0xfd64u           /* IPv6: fd64:7574:7966::1 */
#define SELF_SECOND 0x7574u
#define SELF_THIRD 0x7966u

/* What the egress process gets for a sandbox. The last one keeps the sk_lookup program attached. */
enum { EGRESS_FD_LISTENER, EGRESS_FD_RESOLVER, EGRESS_FD_PROGRAM, EGRESS_FDS };

int netns_prepare(int netns);                   /* once, with the host's namespace: 0 or -errno */
int netns_open(int netns, int fds[EGRESS_FDS]); /* 0 or -errno */
void netns_close(int netns);                    /* removes the routes: no packet leaves any more */

/* A socket in that namespace, or in ours with -1, that connects to a server there: its descriptor or -errno. */
int netns_connect(int netns, uint16_t port, int ipv6);

/* --- Parts of it --------------------------------------------------------------------------------- */

int routes_configure(bool open, bool ipv6);    /* set up or remove them in the current namespace: 0 or -errno */
int sk_lookup_attach(int netns, int listener); /* a descriptor that keeps the program attached, or -errno */
