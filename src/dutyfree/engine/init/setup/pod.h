/* Init in a pod: PID 1 of a container that runs before its owner has a stream to it. */
#pragma once

/* PID 1: wait for `pod_join`, then serve frames on its streams. Returns only if it cannot start: an exit code. */
int pod_run(void);

/* In the same container: give stdin and stdout to PID 1, and stay as long as it runs. Returns an exit code. */
int pod_join(void);
