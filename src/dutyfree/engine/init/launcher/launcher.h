/* launcher/: creates sandboxes for one owner, and removes what they leave.
 *
 * launcher.c is the event loop, sandboxes.c the requests about one sandbox (freeze.c, audit.c: two more of them),
 * snapshot.c its files as layers (overlay_merge.c copies and merges them). A sandbox takes a slot (slot.c): user ids
 * (id_ranges.c), namespaces, a control group (cgroup.c, cgroup_v2.c), and a parked process (parked.c) that gets its
 * descriptors by fd_handover.c. layers.c is the launcher's own root. host.c and host_probe.c find out what this machine
 * allows. Start reading at launcher_run(). */
#pragma once

_Noreturn void launcher_run(int socket, unsigned without); /* without: enum wall */
