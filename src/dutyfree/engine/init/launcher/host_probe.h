/* Which kernel features work here: each is tried separately, for `dutyfree doctor`. */
#ifndef DUTYFREE_HOST_PROBE_H
#define DUTYFREE_HOST_PROBE_H

#include <stddef.h>

void probe_describe(char *text, size_t size); /* "name=errno name=errno …" */

#endif
