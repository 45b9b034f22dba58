/* The filter on system calls that init and everything below it lives under. */
#ifndef DUTYFREE_SECCOMP_H
#define DUTYFREE_SECCOMP_H

void seccomp_prepare(void); /* builds the program, once */
int seccomp_enter(void);    /* for all threads of the process: 0 or -errno */

#endif
