/* What this host lets the launcher do. Found once at the start. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#define IDS 65536u /* ids per sandbox, if the host has that many */

struct host {
	bool rootless;        /* root in a user namespace only: no idmapped mounts, no device nodes, no way back */
	bool own_userns;      /* we created that user namespace ourselves */
	bool can_drop_groups; /* setgroups is allowed */
	unsigned ids;         /* ids that a sandbox has */
	unsigned without;     /* enum wall: what all sandboxes of this launcher lack */
	bool keeps;           /* sandboxes with a lease outlive the owner */
};

extern struct host host;

/* Without CAP_SYS_ADMIN, enter a new user namespace: 0 or -errno. */
int host_enter(void);
void host_describe(char *text, size_t size);
