/* Init as a guest: PID 1 of a container that another runtime made, such as Docker. */
#pragma once

#include <stdbool.h>

/* Where something else may write to the stream first, such as a shell's start-up files, this comes before frames. */
extern const char guest_preamble[11];

/* Serve frames on stdin and stdout, or on a socket with the number CONTROL_FD, until the input ends. Returns only if it
 * cannot start: an exit code. */
int guest_run(bool has_socket);

/* The same for setup/remote.c and setup/machine.c. `among_others`: we are not PID 1, and see the processes of the whole
 * machine. */
int guest_serve(bool among_others);
