/* Init as a guest: PID 1 of a container that another runtime made, such as Docker. */
#pragma once

/* Serve frames on stdin and stdout until stdin ends. Returns only if it cannot start: an exit code. */
int guest_run(void);
