/* The launcher's sandboxes: their making, what is done to them from outside, and their end. */
#ifndef DUTYFREE_BOX_H
#define DUTYFREE_BOX_H

#include "protocol.h"
#include "launcher/slot.h"

#include <stdbool.h>
#include <stddef.h>

struct sandbox {
	uint32_t number;
	uint32_t trees;
	struct slot *slot;
	int upper;       /* what it writes, without its ids, mounted nowhere: layers can be made of it */
	bool ended;
	bool upper_taken;      /* what it wrote became layers */
	bool destroying;    /* a DESTROY is to be answered when it has ended */
	uint32_t destroy_serial; /* with this */
	bool frozen;     /* it was, at some time */
	int freeze_events;    /* what tells that all stand still, -1 while nobody waits for it */
	uint32_t freeze_serial;
	bool shared_network;     /* it is in our own network */
	bool has_egress;  /* there is a way out */
	bool had_egress;     /* there was one, at some time */
	bool egress_opening, egress_closing; /* there will be one, or none */
	uint32_t network_serial;  /* a NETWORK is to be answered with this, when the egress process has done it */
};

/* What an event of the launcher's epoll is about: the number of a sandbox whose process has ended, or that with
 * the first of these, or the second alone, or the number of a copy with the third; 0 is the owner. */
#define FREEZE_EVENT (1ull << 32)
#define EGRESS_EVENT (1ull << 33)
#define SNAPSHOT_EVENT (1ull << 34)

extern int launcher_epoll;

/* To the owner (launcher.c). */
void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count);
void refuse(uint32_t serial, int error, const char *step);

struct sandbox *sandbox_find(uint32_t number); /* NULL if there is none */
struct sandbox *sandbox_next(uint32_t *at);  /* all that live, beginning with at = 0; NULL at the end */
void sandbox_create(const struct request *request, const char *body);
void sandbox_destroy(const struct request *request);
void sandbox_ended(struct sandbox *sandbox, unsigned slots_target); /* PID 1, and with it all of its processes */

void sandbox_snapshot(const struct request *request); /* what it wrote */
void snapshot_merge_request(const struct request *request, const char *body, int target);
void snapshot_job_ended(uint32_t number);

/* freeze.c */
void sandbox_freeze(const struct request *request);
void freeze_check(struct sandbox *sandbox);                   /* perhaps: something changed */
void freeze_finish(struct sandbox *sandbox, int error); /* answers who waits for it, if anybody does */

bool freeze_is_polling(void);                            /* some were told to stand still a moment ago */
void freeze_poll(void);                       /* whether they do */

/* audit.c */
void sandbox_audit(const struct request *request);

#endif
