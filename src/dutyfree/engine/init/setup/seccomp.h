/* The seccomp filter for init and all processes of a sandbox. */
#pragma once

#include <stdint.h>

unsigned seccomp_prepare(void); /* once: build the BPF program; returns its number of instructions */
/* Install the filter for all threads. Returns the seccomp notification descriptor (seccomp_broker.h), -EBUSY if there
 * is already one around us, or -errno. */
int seccomp_enter(void);

/* A random token that allows some calls to init alone: to start commands in a control group, create sockets, set time
 * slices and mark processes. No process of the sandbox can read it, neither from init's memory nor from the filter. */
extern uint64_t seccomp_token[2];
