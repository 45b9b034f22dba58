#define _GNU_SOURCE
#include "sockets.h"

#include "seccomp.h"
#include "sys.h"

#include <fcntl.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ENOUGH 512 /* sockets of a sandbox, of all kinds: then there are none of these any more */

static int asked = -1, counted = -1;

void sockets_open(int listener, bool shared)
{
	asked = listener;
	if (listener >= 0 && !shared)
		counted = open("/proc/self/net/sockstat", O_RDONLY | O_CLOEXEC);
}

int sockets_listener(void)
{
	return asked;
}

static bool enough(void)
{
	char text[64];
	unsigned used;
	ssize_t size = counted < 0 ? 0 : pread(counted, text, sizeof text - 1, 0);

	text[size < 0 ? 0 : size] = 0;
	return sscanf(text, "sockets: used %u", &used) == 1 && used >= ENOUGH;
}

/* A socket as the call wants it, or -errno. */
static int make(const struct seccomp_data *call)
{
	if (enough())
		return -ENOBUFS;
	long made = syscall(SYS_socket, call->args[0], call->args[1] | SOCK_CLOEXEC, call->args[2], seccomp_pass[0],
			    seccomp_pass[1]);
	return made < 0 ? -errno : (int)made;
}

void sockets_serve(void)
{
	/* The kernel's idea of both may be larger than ours. */
	union {
		struct seccomp_notif question;
		struct seccomp_notif_resp answer;
		char room[512];
	} message;

	memset(&message, 0, sizeof message);
	if (ioctl(asked, SECCOMP_IOCTL_NOTIF_RECV, &message) < 0)
		return; /* it was killed meanwhile */
	uint64_t id = message.question.id;
	AUTOCLOSE int made = make(&message.question.data);
	struct seccomp_notif_addfd given = {
		.id = id,
		.flags = SECCOMP_ADDFD_FLAG_SEND,
		.srcfd = (uint32_t)made,
		.newfd_flags = message.question.data.args[1] & SOCK_CLOEXEC ? O_CLOEXEC : 0};
	if (made >= 0 && ioctl(asked, SECCOMP_IOCTL_NOTIF_ADDFD, &given) >= 0)
		return;
	int error = made < 0 ? made : -errno;
	memset(&message, 0, sizeof message);
	message.answer.id = id;
	message.answer.error = error;
	ioctl(asked, SECCOMP_IOCTL_NOTIF_SEND, &message);
}
