/* The filter on system calls that init and everything below it lives under. */
#ifndef DUTYFREE_SECCOMP_H
#define DUTYFREE_SECCOMP_H

#include <stdint.h>

unsigned seccomp_prepare(void); /* builds the program, once: of so many steps */
/* For all threads of the process: where they ask for sockets (seccomp_broker.h), -EBUSY if they need not, or -errno. */
int seccomp_enter(void);

/* Some calls are for whoever knows this: init, which starts commands in a control group of their own, makes sockets,
 * lengthens turns on the processor, and marks processes. No process of the sandbox can read it, neither in init's memory
 * nor in the filter. */
extern uint64_t seccomp_token[2];

#endif
