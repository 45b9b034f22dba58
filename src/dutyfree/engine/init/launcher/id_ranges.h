/* Which user ids a sandbox has on the host: ranges that no two sandboxes of any launcher share. */
#ifndef DUTYFREE_IDS_H
#define DUTYFREE_IDS_H

int id_range_open(void);                /* before the host's files are left: 0 or -errno */
int id_range_claim(unsigned *first);    /* 0 or -errno; until the release, or our end */
void id_range_release(unsigned first);

/* The id that makes a sandbox's user namespace, for which the kernel adds up what all users of the sandbox have. */
unsigned id_maker_claim(unsigned first);
void id_maker_release(unsigned maker);

#endif
