#define _GNU_SOURCE
#include "launcher/parked.h"

#include "launcher/fd_handover.h"
#include "launcher/layers.h"
#include "setup/sandbox.h"
#include "sys.h"
#include "launcher/cgroup_v2.h"

#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static pid_t launch(struct slot *slot, int socket)
{
	struct clone_args args = {
		.flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_PIDFD | CLONE_FILES,
		.pidfd = (uintptr_t)&slot->pidfd,
		.exit_signal = SIGCHLD,
	};

	int group = unified_inits >= 0 ? unified_inits : slot->cgroup.freezer;
	if (group >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)group;
	}
	handover_give(slot, socket);
	pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
	if (pid == 0)
		sandbox_enter(slot);
	int error = -errno;
	handover_take_back(pid < 0 ? -1 : slot->pidfd);
	return pid < 0 ? error : pid;
}

int blank_make(struct slot *slot)
{
	AUTOCLOSE int theirs = -1;
	int pair[2], error = cgroup_reopen(&slot->cgroup);

	if (!error && socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		error = -errno;
	if (error)
		return error;
	slot->socket = pair[0];
	theirs = pair[1];
	pid_t pid = launch(slot, theirs);
	/* It is in its groups by its own copy: thousands of sandboxes shall not cost six descriptors each. */
	cgroup_shut(&slot->cgroup);
	if (pid < 0) {
		close_fd(&slot->socket);
		return pid;
	}
	slot->pid = pid;
	return 0;
}

/* What it shall write to, and the layers that are mounted nowhere, go with it. */
int blank_order(const struct slot *slot, struct order *order, int upper)
{
	int mounts[1 + FLOATING_MAX] = {upper};

	order->floating = 0;
	for (uint32_t i = 0; i < order->wanted.trees; i++) {
		const struct tree *tree = &order->wanted.tree[i];
		for (uint32_t layer = 0; layer < tree->count; layer++) {
			int mount = layer_descriptor(tree->layers[layer]);
			if (mount < 0)
				continue;
			if (order->floating == FLOATING_MAX)
				return -E2BIG;
			order->number[order->floating] = tree->layers[layer];
			mounts[++order->floating] = mount;
		}
	}
	return send_message(slot->socket, order, sizeof *order, NULL, 0, mounts, 1 + (int)order->floating);
}

void blank_discard(struct slot *slot)
{
	close_fd(&slot->socket);
	if (!slot->pid)
		return;
	pidfd_signal(slot->pidfd, SIGKILL);
	waitpid(slot->pid, NULL, 0);
	close_fd(&slot->pidfd);
	slot->pid = 0;
}
