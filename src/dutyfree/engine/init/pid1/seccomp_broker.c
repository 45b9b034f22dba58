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

/* With this many sockets of all kinds in the sandbox, init creates no more, or refuses further connections. */
#define SOCKETS_MAX 512
#define CONNECT_SOCKETS_MAX 4096
#define FILTER_TASKS_MAX 256 /* with more tasks, no further seccomp filters */

/* The smallest IPv6 address. Of other addresses that connect() takes, only AF_UNIX paths are as long. */
#define IPV6_ADDRESS_MIN 24
/* Rate limit for IPv6 destinations: this many at once, then one per interval. */
#define BURST 4096
#define INTERVAL_NS 1000000u

static int listener_fd = -1, sockstat = -1;
static uint64_t next_due; /* when the next destination is due; in the future while the limit is exceeded */

void broker_open(int listener, bool shared)
{
	listener_fd = listener;
	if (listener >= 0 && !shared)
		sockstat = open("/proc/self/net/sockstat", O_RDONLY | O_CLOEXEC);
#ifdef SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP
	/* The caller waits for us: wake it on the same CPU. Older kernels do not have this flag. */
	if (listener >= 0)
		ioctl(listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP);
#endif
}

int broker_listener(void)
{
	return listener_fd;
}

static bool has_sockets(unsigned count)
{
	char text[64];
	unsigned used;
	ssize_t size = sockstat < 0 ? 0 : pread(sockstat, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	return sscanf(text, "sockets: used %u", &used) == 1 && used >= count;
}

/* Whether the sandbox has more tasks, threads included. */
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

/* Other datagram protocols may make the kernel load a module. */
static bool is_known_protocol(uint64_t protocol)
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

/* Whether all IPv6 addresses are routed to the loopback (routes.c). */
static bool routes_all_ipv6(void)
{
	char text[1024], self[16];
	ssize_t size = sockstat < 0 ? -1 : read_file(AT_FDCWD, "/proc/self/net/if_inet6", text, sizeof text);

	snprintf(self, sizeof self, "%04x%04x%04x", SELF_FIRST, SELF_SECOND, SELF_THIRD);
	return size > 0 && strstr(text, self);
}

/* Count one more destination. */
static void rate_limit(void)
{
	const uint64_t window = BURST * (uint64_t)INTERVAL_NS;
	uint64_t moment = now(), early = moment > window ? moment - window : 0; /* now() is small after a boot */

	next_due = (next_due < early ? early : next_due) + INTERVAL_NS;
	if (next_due > moment && !routes_all_ipv6())
		next_due = early;
}

uint64_t broker_next(void)
{
	return next_due > now() ? next_due : UINT64_MAX;
}

/* Create the socket that the call asks for: a descriptor or -errno. */
static int make_socket(const struct seccomp_data *call)
{
	if ((uint32_t)call->args[0] != AF_NETLINK && !is_known_protocol(call->args[2]))
		return -EPROTONOSUPPORT;
	if (has_sockets(SOCKETS_MAX))
		return -ENOBUFS;
	long fd = syscall(SYS_socket, call->args[0], call->args[1] | SOCK_CLOEXEC, call->args[2], seccomp_token[0],
			    seccomp_token[1]);
	return fd < 0 ? -errno : (int)fd;
}

/* 0 lets the kernel continue the call, -errno fails it. Memory of the caller is not read, because it could change. */
static int check_call(const struct seccomp_data *call)
{
	if (call->nr == SYS_connect && (uint32_t)call->args[2] >= IPV6_ADDRESS_MIN)
		rate_limit();
	if (call->nr == SYS_connect)
		return has_sockets(CONNECT_SOCKETS_MAX) ? -ENOBUFS : 0;
	return has_tasks(FILTER_TASKS_MAX) ? -EAGAIN : 0;
}

static void respond(uint64_t id, int error)
{
	/* The kernel's struct may be larger than ours. */
	union {
		struct seccomp_notif_resp answer;
		char room[512];
	} message;

	memset(&message, 0, sizeof message);
	message.answer.id = id;
	message.answer.error = error;
	message.answer.flags = error ? 0 : SECCOMP_USER_NOTIF_FLAG_CONTINUE;
	ioctl(listener_fd, SECCOMP_IOCTL_NOTIF_SEND, &message);
}

static void respond_with_socket(const struct seccomp_notif *notification)
{
	AUTOCLOSE int fd = make_socket(&notification->data);
	struct seccomp_notif_addfd addfd = {
		.id = notification->id,
		.flags = SECCOMP_ADDFD_FLAG_SEND,
		.srcfd = (uint32_t)fd,
		.newfd_flags = notification->data.args[1] & SOCK_CLOEXEC ? O_CLOEXEC : 0};

	if (fd < 0)
		respond(notification->id, fd);
	else if (ioctl(listener_fd, SECCOMP_IOCTL_NOTIF_ADDFD, &addfd) < 0)
		respond(notification->id, -errno);
}

void broker_serve(void)
{
	union {
		struct seccomp_notif notification;
		char room[512];
	} message;

	memset(&message, 0, sizeof message);
	if (ioctl(listener_fd, SECCOMP_IOCTL_NOTIF_RECV, &message) < 0)
		return; /* the caller was killed */
	if (message.notification.data.nr == SYS_socket)
		respond_with_socket(&message.notification);
	else
		respond(message.notification.id, check_call(&message.notification.data));
}
