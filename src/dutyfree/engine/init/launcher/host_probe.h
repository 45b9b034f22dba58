/* What of the kernel works here: found by trying each thing apart, for `dutyfree doctor`. */
#ifndef DUTYFREE_PROBE_H
#define DUTYFREE_PROBE_H

#include <stddef.h>

void probe_describe(char *text, size_t size); /* name=errno, separated by spaces */

#endif
