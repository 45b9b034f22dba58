/* The launcher's sandboxes: their making, what is done to them from outside, and their end. */
#ifndef DUTYFREE_BOX_H
#define DUTYFREE_BOX_H

#include "protocol.h"
#include "launcher/slot.h"

#include <stdbool.h>
#include <stddef.h>

struct box {
	uint32_t number;
	uint32_t trees;
	struct slot *slot;
	int upper;       /* what it writes, without its ids, mounted nowhere: layers can be made of it */
	bool ended;
	bool taken;      /* what it wrote became layers */
	bool awaited;    /* a DESTROY is to be answered when it has ended */
	uint32_t serial; /* with this */
	bool frozen;     /* it was, at some time */
	int freezing;    /* what tells that all stand still, -1 while nobody waits for it */
	uint32_t freeze_serial;
	bool shared;     /* it is in our own network */
	bool networked;  /* there is a way out */
	bool opened;     /* there was one, at some time */
	bool opening, closing; /* there will be one, or none */
	uint32_t asked;  /* a NETWORK is to be answered with this, when the egress process has done it */
};

/* What an event of the launcher's epoll is about: the number of a sandbox whose process has ended, or that with
 * the first of these, or the second alone, or the number of a copy with the third; 0 is the owner. */
#define FREEZE_EVENT (1ull << 32)
#define EGRESS_EVENT (1ull << 33)
#define COPY_EVENT (1ull << 34)

extern int launcher_epoll;

/* To the owner (launcher.c). */
void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count);
void refuse(uint32_t serial, int error, const char *step);

struct box *box_of(uint32_t number); /* NULL if there is none */
struct box *box_next(uint32_t *at);  /* all that live, beginning with at = 0; NULL at the end */
void box_create(const struct request *request, const char *body);
void box_destroy(const struct request *request);
void box_ended(struct box *box, unsigned wanted_ready); /* PID 1, and with it all of its processes */

/* freeze.c */
void box_freeze(const struct request *request);
void box_frozen(struct box *box);                   /* perhaps: something changed */
void box_freezing_ends(struct box *box, int error); /* answers who waits for it, if anybody does */

bool box_freezing(void);                            /* some were told to stand still a moment ago */
void box_freezing_look(void);                       /* whether they do */

/* audit.c */
void box_look(const struct request *request);

/* snapshot_layers.c */
void box_keep(const struct request *request); /* what it wrote */
void layers_merge(const struct request *request, const char *body, int target);
void copy_ended(uint32_t number);

/* client_sandbox.c */
void box_network(const struct request *request, const char *body);
void box_connect(const struct request *request, const struct port *port);
void box_egress_said(void);

#endif
