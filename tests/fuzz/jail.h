/* What a harness shares: a place to write in, and a view of the host in which nothing else can be written. */
#ifndef DUTYFREE_FUZZ_JAIL_H
#define DUTYFREE_FUZZ_JAIL_H

#include <stddef.h>
#include <stdint.h>

/* No process has such a number: signals to it reach nobody. */
#define NOBODY_PID 5000000

/* The exit code where none can be made: none of the fuzzer's own. */
#define NO_JAIL 78

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

void jail_enter(void);     /* once; the working directory is empty then, and a file system of its own */
void jail_empty(void);     /* the working directory, for the next input */
void jail_terminals(void); /* of its own, in place of the host's */
void jail_file(const char *path, const void *data, size_t size);
void jail_cover(const char *path, const char *with); /* a file of the host by one in here */
int jail_memory(const void *data, size_t size);      /* a descriptor of a file with this in it */
void require(int holds, const char *what);           /* else the input is a finding */

#endif
