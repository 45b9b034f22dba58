/* Ranges of user ids for sandboxes. No two sandboxes on the host share one, whichever launcher they belong to. */
#pragma once

int id_range_open(void);             /* before the host's files become unreachable: 0 or -errno */
int id_range_claim(unsigned *first); /* until release or exit: 0 or -errno */
void id_range_release(unsigned first);

/* The id that creates a sandbox's user namespace. Per-user limits of the kernel count all users of the sandbox for it. */
unsigned id_creator_claim(unsigned first);
void id_creator_release(unsigned creator);
