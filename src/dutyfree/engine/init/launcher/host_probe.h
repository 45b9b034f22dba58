/* Which kernel features work here: each is tried separately, for `dutyfree doctor`. */
#pragma once

#include <stddef.h>

void probe_describe(char *text, size_t size); /* "name=errno name=errno …" */
