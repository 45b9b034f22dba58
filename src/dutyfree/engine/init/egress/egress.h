/* The egress process: one per launcher, in the host's network, with no privilege. It takes the connections
 * and the lookups of names that sandboxes make (netns.h), judges each by the sandbox's policy
 * (policy.h), and carries out what is allowed. All that it holds for one sandbox is bounded, and every
 * sandbox has its turn, however much another one asks for. */
#ifndef DUTYFREE_EGRESS_H
#define DUTYFREE_EGRESS_H

#include "egress/policy.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/types.h>

/* What the launcher says, in the form of its own requests: a struct request, then a policy. Answered by a
 * struct reply, unless the serial is 0. */
enum egress_kind {
	EGRESS_OPEN = 1,   /* number = a sandbox; descriptors: netns.h */
	EGRESS_UPDATE = 2, /* another policy; what was connected is cut */
	EGRESS_CLOSE = 3,  /* cut everything, and forget the sandbox */
};

/* In the launcher: a socket to a new process, or -errno. */
int egress_start(pid_t *pid);

/* --- Inside ------------------------------------------------------------------------------------------- */

#define CONNECTIONS_MAX 512 /* of one sandbox, those that are being made included */
#define LOOKUPS_MAX 64

enum watch_kind { WATCH_LISTENER, WATCH_RESOLVER, WATCH_INSIDE, WATCH_OUTSIDE, WATCH_LOOKUP };

/* What an event is about: the first member of each that can be watched. The kernel tells once that it is ready;
 * then it waits for its sandbox's turn, and is watched again when it was served. */
struct watch {
	enum watch_kind kind;
	int fd;
	uint32_t interest; /* 0: not watched */
	uint32_t events;   /* that came */
	bool armed;        /* the kernel will tell */
	struct client *client;
	struct watch *next, **link; /* among those of its sandbox that are ready */
};

struct client {
	struct watch listener, resolver;
	struct client *next;
	struct watch *ready, **ready_end; /* whoever has a thousand connections gets as many turns as others */
	struct client *next_busy;
	bool busy; /* something of it is ready */
	uint32_t number;
	int program;
	struct policy policy;
	struct connection *connections;
	unsigned connection_count;
	struct lookup *lookups;
	unsigned lookup_count;
};

void watch_set(struct client *client, struct watch *watch, uint32_t interest); /* 0 for nothing */
void listener_pause(struct client *client); /* no descriptor is left for what its listener has */
void egress_free(void *memory); /* frees it, and notes that a descriptor has been given back */
bool is_host_address(const struct in6_addr *address); /* it is one of the host's own, or no destination */

void egress_seccomp_enter(void); /* for good: sockets of IP, memory, and nothing else */

int relay_prepare(void); /* once: 0 or -errno */
void relay_accept(struct client *client);
void relay_event(struct client *client, struct watch *watch, uint32_t events);
void relay_close_all(struct client *client); /* all of them */

void lookup_receive(struct client *client);
void lookup_event(struct client *client, struct watch *watch);
void lookup_cancel_all(struct client *client); /* all of them */
void lookup_retry(struct client *client, uint64_t moment);
unsigned lookup_total(void); /* of all sandboxes */

socklen_t socket_address(const struct in6_addr *address, uint16_t port, struct sockaddr_storage *made);

#endif
