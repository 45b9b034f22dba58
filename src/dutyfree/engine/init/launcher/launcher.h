/* The launcher: makes sandboxes for its owner, and is the last one out. */
#ifndef DUTYFREE_LAUNCHER_H
#define DUTYFREE_LAUNCHER_H

_Noreturn void launcher_run(int socket);

#endif
