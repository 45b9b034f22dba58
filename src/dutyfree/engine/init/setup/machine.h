/* Init as PID 1 of a virtual machine. */
#pragma once

/* Load modules, mount the root file system, wait for the owner's word, and serve frames on a virtio port until it is
 * closed. Returns only if it cannot start: an exit code; the kernel then stops the machine. */
int machine_run(void);

/* Print the frequency of the processor's time stamp counter, in kHz: an emulated machine has no clock to find it. */
int machine_print_tsc(void);
