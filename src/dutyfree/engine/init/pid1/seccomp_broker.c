#define _GNU_SOURCE
#include "pid1/seccomp_broker.h"

#include "egress/netns.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Sockets of a sandbox, of all kinds, from which on there are no more of those that init makes, and no more
 * connections. */
#define ENOUGH_TO_MAKE 512
#define ENOUGH_TO_CONNECT 4096
#define TASKS 256 /* with more than these there are no further filters */

/* IPv6 addresses have at least this size. Of all others that connect() takes, only names of AF_UNIX can have it. */
#define LONG_ADDRESS 24
/* So many destinations at once; after that, one in so many nanoseconds. */
#define AT_ONCE 4096
#define EACH 1000000u

static int asked = -1, counted = -1;
static uint64_t taken; /* when the next destination is due; in the future only if it has to wait */

void asked_open(int listener, bool shared)
{
	asked = listener;
	if (listener >= 0 && !shared)
		counted = open("/proc/self/net/sockstat", O_RDONLY | O_CLOEXEC);
#ifdef SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP
	/* Whoever asks waits anyhow: answer on the same processor. Older kernels do not know it. */
	if (listener >= 0)
		ioctl(listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP);
#endif
}

int asked_listener(void)
{
	return asked;
}

static bool has_sockets(unsigned count)
{
	char text[64];
	unsigned used;
	ssize_t size = counted < 0 ? 0 : pread(counted, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	return sscanf(text, "sockets: used %u", &used) == 1 && used >= count;
}

/* Whether more tasks live in the sandbox, threads included. */
static bool has_tasks(unsigned count)
{
	DIR *proc = opendir("/proc");
	unsigned found = 0;

	for (struct dirent *entry; proc && found <= count && (entry = readdir(proc));) {
		char path[32];
		struct stat threads;
		snprintf(path, sizeof path, "%.16s/task", entry->d_name);
		if (atoi(entry->d_name) > 0 && fstatat(dirfd(proc), path, &threads, 0) == 0)
			found += (unsigned)threads.st_nlink - 2;
	}
	if (proc)
		closedir(proc);
	return !proc || found > count;
}

/* For other protocols of datagrams the kernel may load a module. */
static bool is_known(uint64_t protocol)
{
	switch ((uint32_t)protocol) {
	case 0:
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		return true;
	}
	return false;
}

/* Whether the kernel sends connections to every address of IPv6 to the loopback (routes.c). */
static bool leads_everywhere(void)
{
	char text[1024], self[16];
	ssize_t size = counted < 0 ? -1 : read_file(AT_FDCWD, "/proc/self/net/if_inet6", text, sizeof text);

	snprintf(self, sizeof self, "%04x%04x%04x", SELF_FIRST, SELF_SECOND, SELF_THIRD);
	return size > 0 && strstr(text, self);
}

/* One more destination. */
static void take_turn(void)
{
	const uint64_t window = AT_ONCE * (uint64_t)EACH;
	uint64_t moment = now(), early = moment > window ? moment - window : 0; /* the host may have just started */

	taken = (taken < early ? early : taken) + EACH;
	if (taken > moment && !leads_everywhere())
		taken = early;
}

uint64_t asked_next(void)
{
	return taken > now() ? taken : UINT64_MAX;
}

/* A socket as the call wants it, or -errno. */
static int make_socket(const struct seccomp_data *call)
{
	if ((uint32_t)call->args[0] != AF_NETLINK && !is_known(call->args[2]))
		return -EPROTONOSUPPORT;
	if (has_sockets(ENOUGH_TO_MAKE))
		return -ENOBUFS;
	long made = syscall(SYS_socket, call->args[0], call->args[1] | SOCK_CLOEXEC, call->args[2], seccomp_pass[0],
			    seccomp_pass[1]);
	return made < 0 ? -errno : (int)made;
}

/* Of calls that the kernel goes on with: 0, or -errno. What they point to is not looked at, as it may change. */
static int judge(const struct seccomp_data *call)
{
	if (call->nr == SYS_connect && (uint32_t)call->args[2] >= LONG_ADDRESS)
		take_turn();
	if (call->nr == SYS_connect)
		return has_sockets(ENOUGH_TO_CONNECT) ? -ENOBUFS : 0;
	return has_tasks(TASKS) ? -EAGAIN : 0;
}

static void answer(uint64_t id, int error)
{
	/* The kernel's idea of it may be larger than ours. */
	union {
		struct seccomp_notif_resp answer;
		char room[512];
	} message;

	memset(&message, 0, sizeof message);
	message.answer.id = id;
	message.answer.error = error;
	message.answer.flags = error ? 0 : SECCOMP_USER_NOTIF_FLAG_CONTINUE;
	ioctl(asked, SECCOMP_IOCTL_NOTIF_SEND, &message);
}

static void answer_with_socket(const struct seccomp_notif *question)
{
	AUTOCLOSE int made = make_socket(&question->data);
	struct seccomp_notif_addfd given = {
		.id = question->id,
		.flags = SECCOMP_ADDFD_FLAG_SEND,
		.srcfd = (uint32_t)made,
		.newfd_flags = question->data.args[1] & SOCK_CLOEXEC ? O_CLOEXEC : 0};

	if (made < 0)
		answer(question->id, made);
	else if (ioctl(asked, SECCOMP_IOCTL_NOTIF_ADDFD, &given) < 0)
		answer(question->id, -errno);
}

void asked_serve(void)
{
	union {
		struct seccomp_notif question;
		char room[512];
	} message;

	memset(&message, 0, sizeof message);
	if (ioctl(asked, SECCOMP_IOCTL_NOTIF_RECV, &message) < 0)
		return; /* it was killed meanwhile */
	if (message.question.data.nr == SYS_socket)
		answer_with_socket(&message.question);
	else
		answer(message.question.id, judge(&message.question.data));
}
