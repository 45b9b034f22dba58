#define _GNU_SOURCE
#include "launcher/launcher.h"

#include "launcher/sandboxes.h"
#include "egress/client.h"
#include "launcher/fd_handover.h"
#include "launcher/host.h"
#include "launcher/layers.h"
#include "launcher/host_probe.h"
#include "protocol.h"
#include "setup/sandbox.h"
#include "setup/seccomp.h"
#include "launcher/slot.h"
#include "launcher/snapshot.h"
#include "sys.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define QUIET_MS 2     /* without a request, until parts are made: not beside the first command of a sandbox */
#define FAILED_MS 1000 /* and until it is tried again */
#define FILES (1u << 20) /* what the kernel allows root by default (fs.nr_open) */

int launcher_epoll;
static int owner;
static unsigned wanted_ready;

void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count)
{
	struct reply head = {.serial = serial, .error = error < 0 ? -error : 0, .value = value, .size = (uint32_t)size};

	/* If the owner is gone, its end of the socket tells us soon. */
	send_message(owner, &head, sizeof head, text, size, fds, count);
}

void refuse(uint32_t serial, int error, const char *step)
{
	reply(serial, error, 0, step, strlen(step), NULL, 0);
}

static void layer(const struct request *request, const char *path)
{
	int directory = -1, number;

	if (request->kind == REQUEST_SCRATCH)
		number = layer_scratch(&directory);
	else
		number = layer_of_host(path);
	if (number < 0) {
		refuse(request->serial, number, "layer");
		return;
	}
	reply(request->serial, 0, (uint32_t)number, NULL, 0, &directory, directory >= 0);
	close_fd(&directory);
	slot_undress(); /* they do not see it */
}

static void serve(const struct request *request, const char *body, int fd)
{
	char text[256];
	int error;

	switch (request->kind) {
	case REQUEST_HELLO:
		cgroup_describe(text, sizeof text);
		host_describe(text + strlen(text), sizeof text - strlen(text));
		reply(request->serial, 0, PROTOCOL_VERSION, text, strlen(text), NULL, 0);
		return;
	case REQUEST_PROBE:
		probe_describe(text, sizeof text);
		reply(request->serial, 0, 0, text, strlen(text), NULL, 0);
		return;
	case REQUEST_LAYER:
		if (request->size == 0 || body[request->size - 1] || body[0] != '/')
			break;
		layer(request, body);
		return;
	case REQUEST_SCRATCH:
		layer(request, NULL);
		return;
	case REQUEST_FORGET:
		if (layer_descriptor(request->number) < 0)
			slot_undress(); /* they would hold it */
		error = layer_forget(request->number);
		reply(request->serial, error, request->number, NULL, 0, NULL, 0);
		return;
	case REQUEST_CREATE:
		box_create(request, body);
		return;
	case REQUEST_DESTROY:
		box_destroy(request);
		return;
	case REQUEST_TAKE:
	case REQUEST_COPY:
		box_keep(request);
		return;
	case REQUEST_MERGE:
		layers_merge(request, body, fd);
		return;
	case REQUEST_FREEZE:
	case REQUEST_THAW:
		box_freeze(request);
		return;
	case REQUEST_LOOK:
		box_look(request);
		return;
	case REQUEST_FILL:
		if (request->number > 4096)
			break;
		wanted_ready = request->number;
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	case REQUEST_NETWORK:
		box_network(request, body);
		return;
	case REQUEST_CONNECT:
		if (request->size != sizeof(struct port))
			break;
		box_connect(request, (const struct port *)(const void *)body);
		return;
	}
	refuse(request->serial, -EPROTO, "request");
}

/* The owner is gone, or wants us gone: nothing may be left. */
static _Noreturn void leave(void)
{
	uint32_t at = 0;
	for (struct box *box; (box = box_next(&at));)
		pidfd_signal(box->slot->pidfd, SIGKILL);
	slot_undress();
	snapshot_close();
	gate_close();
	while (wait(NULL) > 0 || errno == EINTR)
		;
	cgroup_close();
	_exit(0);
}

static void receive(void)
{
	static union {
		struct request head;
		char bytes[REQUEST_MAX];
	} message;
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(sizeof(int))];
	} rights;
	struct iovec part = {&message, sizeof message};
	struct msghdr parts = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = rights.space, .msg_controllen = sizeof rights.space};
	ssize_t size = recvmsg(owner, &parts, MSG_TRUNC | MSG_CMSG_CLOEXEC);
	AUTOCLOSE int fd = -1;

	if (size < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (size <= 0)
		leave();
	const struct cmsghdr *head = CMSG_FIRSTHDR(&parts);
	if (head && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof fd))
		memcpy(&fd, CMSG_DATA(head), sizeof fd);
	if ((size_t)size < sizeof message.head || (size_t)size > sizeof message ||
	    message.head.size != (size_t)size - sizeof message.head) {
		refuse((size_t)size < sizeof message.head ? 0 : message.head.serial, -EPROTO, "request");
		return;
	}
	serve(&message.head, message.bytes + sizeof message.head, fd);
}

/* Whether the kernel lets a process be looked into though it has changed its user. A command's does, while it
 * shares init's memory. */
static bool lets_others_look(int proc)
{
	char text[16];

	return read_file(proc, "sys/fs/suid_dumpable", text, sizeof text) > 0 && atoi(text) == 1;
}

static void prepare(void)
{
	struct rlimit files;
	sigset_t all;

	/* A Ctrl-C is for the owner; its end ends us. */
	setsid();
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	prctl(PR_SET_NAME, "dutyfree-engine");
	const char *step = "user namespace";
	int error = host_enter(); /* while we can be looked into: those who map its ids must */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	/* Three for each sandbox: beyond the hard limit where we may, else up to it. */
	files = (struct rlimit){FILES, FILES};
	if (setrlimit(RLIMIT_NOFILE, &files) < 0 && getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
#ifdef __SANITIZE_ADDRESS__
	const int silent = 1; /* what the sanitizer finds is to be heard */
#else
	const int silent = 2;
#endif
	for (int fd = 0; fd <= silent; fd++)
		dup2(null, fd);
	close(null);
	if (handover_open(&owner))
		_exit(71);
	int proc = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (!error && proc < 0) {
		step = "/proc";
		error = -errno;
	}
	if (!error && lets_others_look(proc)) {
		step = "fs.suid_dumpable is 1, which opens PID 1 to its sandbox: set it to 0 or 2";
		error = -EPERM;
	}
	if (!error) {
		step = "control groups";
		error = cgroup_open(proc);
	}
	if (!error) {
		step = "network namespaces";
		error = slot_open(proc);
	}
	if (!error) {
		step = "mount namespaces";
		error = layers_open(proc);
	}
	if (error) {
		refuse(0, error, step);
		cgroup_close();
		_exit(70);
	}
	sandbox_prepare(proc);
	seccomp_prepare();
}

static void happened(uint64_t what)
{
	struct box *box = (uint32_t)what ? box_of((uint32_t)what) : NULL;

	if (what == 0)
		receive();
	else if (what == EGRESS_EVENT)
		box_egress_said();
	else if (what & COPY_EVENT)
		copy_ended((uint32_t)what);
	else if (box && what & FREEZE_EVENT)
		box_frozen(box);
	else if (box && !box->ended)
		box_ended(box, wanted_ready);
}

_Noreturn void launcher_run(int socket)
{
	struct epoll_event events[64];
	int pause_ms = QUIET_MS;

	owner = socket;
	fcntl(owner, F_SETFD, FD_CLOEXEC);
	prepare();
	launcher_epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
	if (launcher_epoll < 0 || epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, owner, &event) < 0) {
		refuse(0, -errno, "epoll");
		leave();
	}
	for (;;) {
		bool freezing = box_freezing();
		int wait_ms = freezing ? 1 : slot_short(wanted_ready) ? pause_ms : -1;
		int count = epoll_wait(launcher_epoll, events, 64, wait_ms);
		if (count == 0 && freezing)
			box_freezing_look();
		else if (count == 0) /* nothing to do: make parts for sandboxes to come */
			pause_ms = slot_prepare(wanted_ready) < 0 ? FAILED_MS : QUIET_MS;
		for (int i = 0; i < count; i++)
			happened(events[i].data.u64);
	}
}
