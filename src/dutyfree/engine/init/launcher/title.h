/* What /proc/PID/cmdline says of a launcher and of its sandboxes, for `dutyfree ps`. A sandbox can read its
 * own: nothing of the host belongs there. */
#ifndef DUTYFREE_TITLE_H
#define DUTYFREE_TITLE_H

#include "protocol.h"

/* An argument as long as the longest title, to be overwritten. */
extern const char title_placeholder[LABEL_MAX + 16];

void title_init(int argc, char **argv); /* where the arguments lie: once, at the start */
void title_set(const char *label);      /* in the clone: a sandbox of this number and image */

#endif
