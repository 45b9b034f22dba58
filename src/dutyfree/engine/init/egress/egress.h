/* egress/: network connections from sandboxes to the outside.
 *
 * The egress process (egress.c), one per launcher, runs in the host's network without privileges and under its own
 * seccomp filter (egress_seccomp.c). It accepts TCP connections (relay.c) and DNS queries (dns_forward.c, dns.c) from
 * sandboxes, checks each against the sandbox's network policy (policy.c), and forwards what is allowed. Memory and
 * descriptors per sandbox are limited, and sandboxes are served in turns.
 * In the launcher, client.c talks to the egress process, and netns.c (with routes.c and sk_lookup.c) redirects the
 * traffic of a sandbox's network namespace to it. Start reading at netns.h, then egress_start() in egress.c. */
#pragma once

#include "egress/policy.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/types.h>

/* Messages from the launcher: a struct request with one of these kinds, then a policy. The answer is a struct reply,
 * unless the serial is 0. */
enum egress_kind {
	EGRESS_OPEN = 1,   /* number = sandbox; descriptors as in netns.h */
	EGRESS_UPDATE = 2, /* new policy; closes all connections */
	EGRESS_CLOSE = 3,  /* close everything of the sandbox */
};

/* In the launcher: start the process. Returns a socket to it, or -errno. */
int egress_start(pid_t *pid);

/* --- In the egress process ----------------------------------------------------------------------- */

#define CONNECTIONS_MAX 512 /* per sandbox, including those that are still connecting */
#define LOOKUPS_MAX 64

enum watch_kind { WATCH_LISTENER, WATCH_RESOLVER, WATCH_INSIDE, WATCH_OUTSIDE, WATCH_LOOKUP };

/* Something that epoll watches: the first member of its struct. EPOLLONESHOT disarms it when it is ready. It then waits
 * in the ready list of its client, and is armed again after it was served. */
struct watch {
	enum watch_kind kind;
	int fd;
	uint32_t interest; /* epoll events, 0 for not watched */
	uint32_t events;   /* events that are ready */
	bool armed;        /* epoll will report it */
	struct client *client;
	struct watch *next, **link; /* in the ready list of its client */
};

struct client {
	struct watch listener, resolver;
	struct client *next;
	struct watch *ready, **ready_end; /* FIFO. Each client gets the same turns, however many connections it has */
	struct client *next_busy;
	bool busy; /* it is in the queue of clients */
	uint32_t number;
	int program;
	struct policy policy;
	struct connection *connections;
	unsigned connection_count;
	struct lookup *lookups;
	unsigned lookup_count;
};

void watch_set(struct client *client, struct watch *watch, uint32_t interest); /* interest 0: stop watching */
void listener_pause(struct client *client); /* out of descriptors */
void egress_free(void *memory); /* free() what held a descriptor, and note that one is free again */
bool is_host_address(const struct in6_addr *address); /* one of the host's own addresses, or not unicast */

void egress_seccomp_enter(void); /* install the seccomp filter: IP sockets and memory only */

int relay_prepare(void); /* once: 0 or -errno */
void relay_accept(struct client *client);
void relay_event(struct client *client, struct watch *watch, uint32_t events);
void relay_close_all(struct client *client); /* with RST */

void lookup_receive(struct client *client);
void lookup_event(struct client *client, struct watch *watch);
void lookup_cancel_all(struct client *client);
void lookup_retry(struct client *client, uint64_t moment);
unsigned lookup_total(void); /* active lookups of all sandboxes */

socklen_t socket_address(const struct in6_addr *address, uint16_t port, struct sockaddr_storage *result);
