/* The launcher's sandboxes: create, destroy, snapshot, and what is done to them from outside. */
#pragma once

#include "launcher/slot.h"
#include "protocol.h"

#include <stdbool.h>
#include <stddef.h>

struct sandbox {
	uint32_t number;
	uint32_t trees;
	uint64_t disk; /* its disk limit if what it writes goes to disk, else 0 */
	char mountpoint[TREES_MAX][MOUNTPOINT_MAX]; /* of its trees, if it is on disk */
	int overlay[TREES_MAX];                     /* of its trees, while it ends; else -1 */
	struct slot *slot;
	uint64_t lease; /* until when it outlives the owner; 0: it does not */
	bool owned;     /* the present owner has made it or adopted it */
	int upper; /* its writable file system, detached and not idmapped, for snapshots; -1 without */
	bool ended;
	bool upper_taken;  /* its files became layers */
	bool upper_copied; /* a job copies its files, or has copied them */
	bool destroying;  /* reply to DESTROY when it has ended */
	uint32_t destroy_serial;
	bool frozen;       /* it was frozen at some time */
	int freeze_events; /* cgroup.events while a FREEZE waits, else -1 */
	uint32_t freeze_serial;
	bool shared_network;                 /* it uses the launcher's network */
	bool has_egress;                     /* it has egress now */
	bool had_egress;                     /* it had egress at some time */
	bool egress_opening, egress_closing; /* what the egress process is doing */
	uint32_t network_serial;             /* serial of the NETWORK request that waits for the egress process, or 0 */
};

/* Data of the launcher's epoll events: 0 for the owner; a sandbox's number when its PID 1 ends; FREEZE_EVENT with a
 * sandbox's number; EGRESS_EVENT; SNAPSHOT_EVENT with the number of a job; DISK_EVENT;
 * DISPOSED_EVENT; DISPOSER_EVENT; KEEP_EVENT when a new owner connects. */
#define FREEZE_EVENT (1ull << 32)
#define EGRESS_EVENT (1ull << 33)
#define SNAPSHOT_EVENT (1ull << 34)
#define DISK_EVENT (1ull << 35)
#define DISPOSED_EVENT (1ull << 36)
#define DISPOSER_EVENT (1ull << 37)
#define KEEP_EVENT (1ull << 38)

extern int launcher_epoll;

/* Replies to the owner (launcher.c). `step` says what could not be done. */
void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count);
void refuse(uint32_t serial, int error, const char *step);

struct sandbox *sandbox_find(uint32_t number); /* NULL if there is none */
struct sandbox *sandbox_next(uint32_t *at);    /* the next live one, from at = 0; NULL after the last */
void sandbox_create(const struct request *request, const char *body);
void sandbox_destroy(const struct request *request);
void sandbox_ended(struct sandbox *sandbox, unsigned slots_target); /* its PID 1 has ended */

void sandbox_snapshot(const struct request *request);
void snapshot_merge_request(const struct request *request, const char *body, int target);
void snapshot_job_ended(uint32_t number);

/* freeze.c */
void sandbox_freeze(const struct request *request);
void freeze_check(struct sandbox *sandbox);             /* its cgroup.events changed */
void freeze_finish(struct sandbox *sandbox, int error); /* reply to a FREEZE that waits, if any */

int freeze_wait_ms(void); /* milliseconds until freeze_poll, or -1 */
void freeze_poll(void);   /* check all sandboxes that a FREEZE waits for, and try again to freeze them */

/* audit.c */
void sandbox_audit(const struct request *request);
