/* Init on a machine that the owner reaches by a byte stream, such as ssh, and where no runtime made a container. */
#pragma once

/* Make the directory BASE/NAME, serve frames on stdin and stdout until stdin ends, then kill what was started and
 * remove the directory. Returns an exit code. */
int remote_run(const char *base, const char *name);
