/* setup/: a fresh clone of the launcher becomes PID 1 of a sandbox.
 *
 * sandbox.c mounts the root, drops privileges and starts init (pid1/); seccomp.c builds the seccomp filter from the
 * list in syscalls.h. guest.c is the same program as PID 1 of a container that another runtime made. Start reading at setup_run() in sandbox.c. */
#pragma once

#include "launcher/slot.h"
#include "protocol.h"

void setup_prepare(int proc); /* once: find out which masks this host's /proc needs */

/* Create the writable file system of a sandbox. Returns a detached mount for the sandbox, or -errno; `kept` is a second
 * one, from which the launcher takes snapshots. With CREATE_DISK, the file system is already in `kept`. */
int upper_create(const struct create *spec, int *kept);

/* Runs in the clone and does not return: prepare what all sandboxes share, park, then become a sandbox. */
_Noreturn void setup_run(const struct slot *slot);
