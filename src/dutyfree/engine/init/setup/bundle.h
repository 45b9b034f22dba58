/* The root file system of an OCI bundle, for a runtime that makes the container itself (crun, runc, runsc). */
#pragma once

/* "DIRECTORY FIRST_ID OPTIONS HIDDEN GROUPS LOWER... -- COMMAND...": mount the overlay at DIRECTORY/m/root and execute the
 * command. Returns only after an error, with the exit status. */
int bundle_run(int argc, char **argv);
