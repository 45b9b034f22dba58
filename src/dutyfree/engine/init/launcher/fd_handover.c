#include "launcher/fd_handover.h"

#include "launcher/cgroup_v2.h"
#include "sys.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int null_fd;                /* /dev/null, fills unused places */
static _Atomic uint32_t *received; /* shared with the clone until it has its descriptors */

static void put_fd(int fd, int place)
{
	dup3(fd < 0 ? null_fd : fd, place, O_CLOEXEC);
}

int handover_open(int *owner)
{
	int low = open("/dev/null", O_RDWR | O_CLOEXEC);

	received = mmap(NULL, sizeof *received, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	null_fd = fcntl(low, F_DUPFD_CLOEXEC, HANDED_END);
	*owner = fcntl(*owner, F_DUPFD_CLOEXEC, HANDED_END);
	if (received == MAP_FAILED || null_fd < 0 || *owner < 0)
		return -errno;
	/* Occupy all places, so that no other descriptor of ours lands there. */
	for (int fd = 3; fd < HANDED_END; fd++)
		if (fd != low)
			put_fd(-1, fd);
	return 0;
}

void handover_send(const struct slot *slot, int socket, int keeper)
{
	*received = 0;
	put_fd(socket, HANDED_SOCKET);
	put_fd(slot->user_namespace, HANDED_USER);
	put_fd(slot->netns, HANDED_NETWORK);
	put_fd(slot->cgroup.v2_dir, HANDED_PAYLOAD);
	put_fd(cgroup_v2_namespace, HANDED_GROUPS);
	AUTOCLOSE int weight = cgroup_open_weight(&slot->cgroup);
	put_fd(weight, HANDED_WEIGHT);
	AUTOCLOSE int oom = cgroup_open_oom(&slot->cgroup);
	put_fd(oom, HANDED_OOM);
	put_fd(keeper, HANDED_KEEPER);
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		put_fd(slot->cgroup.tasks[kind], HANDED_TASKS + kind);
}

void handover_finish(int pidfd)
{
	const struct timespec moment = {0, 1000000};

	while (pidfd >= 0 && !*received) {
		syscall(SYS_futex, received, FUTEX_WAIT, 0, &moment, NULL, 0);
		if (poll(&(struct pollfd){.fd = pidfd, .events = POLLIN}, 1, 0) > 0)
			break; /* the clone died */
	}
	/* Close our copies: while we hold the sandbox's socket, the owner cannot see that the sandbox has ended. */
	for (int place = HANDED_FIRST; place < HANDED_END; place++)
		put_fd(-1, place);
}

int handover_receive(const struct slot *slot, struct slot *handed)
{
	if (syscall(SYS_close_range, HANDED_END, ~0u, CLOSE_RANGE_UNSHARE) < 0)
		return -errno;
	*received = 1;
	syscall(SYS_futex, received, FUTEX_WAKE, 1, NULL, NULL, 0);
	/* Unmap it: an attacker who takes over PID 1 must not share memory with the launcher. */
	if (munmap((void *)received, sizeof *received) < 0)
		return -errno;
	*handed = *slot;
	handed->user_namespace = HANDED_USER;
	handed->netns = HANDED_NETWORK;
	handed->cgroup.v2_dir = slot->cgroup.v2_dir < 0 ? -1 : HANDED_PAYLOAD;
	for (int kind = 0; kind < CGROUP_KINDS; kind++)
		handed->cgroup.tasks[kind] = slot->cgroup.tasks[kind] < 0 ? -1 : HANDED_TASKS + kind;
	return 0;
}
