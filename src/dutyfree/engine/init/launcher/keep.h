/* Sandboxes that outlive their owner, such as a server that is restarted.
 *
 * After REQUEST_KEEP, a sandbox with a lease stays when the owner is gone, until its lease ends. A new owner connects to
 * the listening socket and adopts it: init gets a new socket (pid1/init.c), the owner the other end. Sandboxes without a
 * lease end with the owner, and the launcher ends when it has neither an owner nor sandboxes. */
#pragma once

#include "protocol.h"

#include <stdbool.h>
#include <stddef.h>

int keep_listen(int listener); /* takes the descriptor: 0 or -errno */
void keep_stop(const struct request *request); /* from now on all sandboxes end with the owner */
int keep_accept(void);         /* the socket of a new owner, or -errno */

void keep_set_lease(const struct request *request, uint64_t until);
void keep_adopt(const struct request *request);
void keep_sweep(const struct request *request, const uint32_t *layers, size_t count);

void keep_orphan(void);       /* the owner is gone: no sandbox has one */
bool keep_end_expired(void);  /* kill sandboxes whose lease has ended. Whether any is left */
int keep_wait_ms(void);       /* milliseconds until the next lease ends; -1 without leases */
