/* Process titles in /proc/PID/cmdline of the launcher and its sandboxes, for `dutyfree ps`. A sandbox can read its own,
 * so it says nothing about the host. */
#pragma once

#include "protocol.h"

/* An argument as long as the longest title. The title overwrites it. */
extern const char title_placeholder[LABEL_MAX + 16];

void title_init(int argc, char **argv); /* remember where the arguments are: once, at the start */
void title_set_owner(int pid);          /* in the launcher: its owner is not its parent; 0 while it has none */
void title_set(const char *label);      /* in the clone: the sandbox's number and image */
