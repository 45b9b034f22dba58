#include "launcher/parked.h"

#include "launcher/cgroup_v2.h"
#include "launcher/fd_handover.h"
#include "launcher/host.h"
#include "launcher/layers.h"
#include "setup/sandbox.h"
#include "sys.h"

#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t clone_parked(struct slot *slot, int socket, int keeper)
{
	struct clone_args args = {
		/* The end of a sandbox relies on the first two, so no launcher goes without them. */
		.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_PIDFD | CLONE_FILES,
		.pidfd = (uintptr_t)&slot->pidfd,
		.exit_signal = SIGCHLD,
	};

	if (!(host.without & WALL_NAMESPACES))
		args.flags |= CLONE_NEWIPC | CLONE_NEWUTS;
	int group = cgroup_v2_inits >= 0 ? cgroup_v2_inits : slot->cgroup.freezer;
	if (group >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)group;
	}
	handover_send(slot, socket, keeper);
	pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		setup_run(slot);
	int error = -errno;
	handover_finish(pid < 0 ? -1 : slot->pidfd);
	return pid < 0 ? error : pid;
}

int parked_create(struct slot *slot)
{
	AUTOCLOSE int theirs = -1;
	AUTOCLOSE int their_keeper = -1;
	int pair[2], error = cgroup_reopen(&slot->cgroup);

	if (!error && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		error = -errno;
	if (error)
		return error;
	slot->socket = pair[0];
	theirs = pair[1];
	if (host.keeps) {
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
			error = -errno;
			close_fd(&slot->socket);
			return error;
		}
		slot->keeper = pair[0];
		their_keeper = pair[1];
	}
	pid_t pid = clone_parked(slot, theirs, their_keeper);
	/* The process has its own copies. Keep none here: six descriptors for each of thousands of sandboxes are too
	 * many. */
	cgroup_close_fds(&slot->cgroup);
	if (pid < 0) {
		close_fd(&slot->socket);
		close_fd(&slot->keeper);
		return pid;
	}
	slot->pid = pid;
	return 0;
}

/* Send the writable file system and all detached layers with the message (SCM_RIGHTS). */
int parked_activate(const struct slot *slot, struct activation *activation, int upper)
{
	int mounts[1 + DETACHED_MAX] = {upper};

	activation->detached = 0;
	for (uint32_t i = 0; i < activation->spec.trees; i++) {
		const struct tree *tree = &activation->spec.tree[i];
		for (uint32_t layer = 0; layer < tree->count; layer++) {
			int mount = layer_detached_fd(tree->layers[layer]);
			if (mount < 0)
				continue;
			if (activation->detached == DETACHED_MAX)
				return -E2BIG;
			activation->number[activation->detached] = tree->layers[layer];
			mounts[++activation->detached] = mount;
		}
	}
	return send_message(slot->socket, activation, sizeof *activation, NULL, 0, mounts, 1 + (int)activation->detached);
}

void parked_kill(struct slot *slot)
{
	close_fd(&slot->socket);
	close_fd(&slot->keeper);
	if (!slot->pid)
		return;
	pidfd_signal(slot->pidfd, SIGKILL);
	waitpid(slot->pid, NULL, 0);
	close_fd(&slot->pidfd);
	slot->pid = 0;
}
