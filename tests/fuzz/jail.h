/* Shared by all harnesses: a directory to write to, and a read-only view of the rest of the host. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* No process has this pid, so signals to it have no effect. */
#define NOBODY_PID 5000000

/* Exit code if no jail can be set up. libFuzzer does not use it. */
#define NO_JAIL 78

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

void jail_enter(void);     /* once; the working directory is then an empty tmpfs */
void jail_empty(void);     /* empty the working directory for the next input */
void jail_terminals(void); /* mount a private devpts */
void jail_file(const char *path, const void *data, size_t size);
void jail_cover(const char *path, const char *with); /* bind-mount one of our files over a file of the host */
int jail_memory(const void *data, size_t size);      /* a memfd with this content */
void require(int holds, const char *what);           /* if it does not hold, the input is a finding */
