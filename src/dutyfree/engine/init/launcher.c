#define _GNU_SOURCE
#include "launcher.h"

#include "blank.h"
#include "gate.h"
#include "handover.h"
#include "host.h"
#include "layers.h"
#include "network.h"
#include "probe.h"
#include "protocol.h"
#include "sandbox.h"
#include "seccomp.h"
#include "slot.h"
#include "snapshot.h"
#include "sys.h"
#include "title.h"
#include "unified.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BOXES 65536u
#define QUIET_MS 2     /* without a request, until parts are made: not beside the first command of a sandbox */
#define FAILED_MS 1000 /* and until it is tried again */
#define EGRESS_EVENT (1ull << 33) /* above the numbers of sandboxes */
#define COPY_EVENT (1ull << 34)   /* beside the number of the copy */
#define FILES (1u << 20) /* what the kernel allows root by default (fs.nr_open) */

struct box {
	uint32_t number;
	uint32_t trees;
	struct slot *slot;
	bool ended;
	bool taken;      /* what it wrote became layers */
	bool awaited;    /* a DESTROY is to be answered when it has ended */
	uint32_t serial; /* with this */
	bool frozen;     /* it was, at some time */
	int freezing;    /* what tells that all stand still, -1 while nobody waits for it */
	uint32_t freeze_serial;
	bool shared;     /* it is in our own network */
	bool networked;  /* there is a way out */
	bool opening, closing; /* there will be one, or none */
	uint32_t asked;  /* a NETWORK is to be answered with this, when the egress process has done it */
};

#define FREEZE_EVENT (1ull << 32) /* beside the number of the sandbox */

static struct box *boxes[BOXES];
static uint32_t last_box, alive;
static int owner, epoll;
static unsigned wanted_ready;

static struct box *box_of(uint32_t number)
{
	struct box *box = boxes[number % BOXES];

	return box && box->number == number ? box : NULL;
}

static void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count)
{
	struct reply head = {.serial = serial, .error = error < 0 ? -error : 0, .value = value, .size = (uint32_t)size};

	/* If the owner is gone, its end of the socket tells us soon. */
	send_message(owner, &head, sizeof head, text, size, fds, count);
}

static void refuse(uint32_t serial, int error, const char *step)
{
	reply(serial, error, 0, step, strlen(step), NULL, 0);
}

static bool sound(const struct create *wanted)
{
	if (wanted->flags & CREATE_SHARED_NETWORK && !host.rootless)
		return false;
	if (wanted->trees < 1 || wanted->trees > TREES_MAX || wanted->tree[0].mountpoint[0])
		return false;
	for (uint32_t i = 0; i < wanted->trees; i++) {
		const struct tree *tree = &wanted->tree[i];
		if (tree->count < 1 || tree->count > LAYERS_MAX || !memchr(tree->mountpoint, 0, MOUNTPOINT_MAX) ||
		    tree->mountpoint[0] == '/' || strstr(tree->mountpoint, ".."))
			return false;
	}
	return true;
}

/* What follows struct create, if anything: one string, or else NULL. */
static const char *label_of(const struct request *request, const char *body)
{
	const char *label = body + sizeof(struct create);

	if (request->size == sizeof(struct create))
		return "";
	if (request->size < sizeof(struct create) || request->size > sizeof(struct create) + LABEL_MAX ||
	    body[request->size - 1] || strlen(label) != request->size - sizeof(struct create) - 1)
		return NULL;
	return label;
}

/* A slot with its limits and a process that waits. */
static const char *equip(struct box *box, const struct create *wanted, int *error)
{
	for (int attempt = 0; attempt < 2; attempt++) {
		box->slot = attempt ? slot_make() : slot_take();
		*error = box->slot ? 0 : -errno;
		if (*error)
			return "user namespace, network or control group";
		*error = cgroup_limit(&box->slot->cgroup, wanted);
		if (*error != -EBUSY)
			break;
		/* Memory of a former tenant that cannot be had back at once: not this one's burden. */
		slot_discard(box->slot);
		box->slot = NULL;
	}
	if (*error)
		return "limits";
	if (!box->slot->pid)
		*error = blank_make(box->slot);
	return "clone";
}

static const char *start(struct box *box, const struct create *wanted, const char *label, int *error)
{
	static struct order order;
	const char *step = equip(box, wanted, error);

	if (*error)
		return step;
	order.wanted = *wanted;
	snprintf(order.label, sizeof order.label, "%s", label);
	*error = blank_order(box->slot, &order);
	if (!*error)
		return step;
	/* It died while it waited. */
	blank_discard(box->slot);
	*error = blank_make(box->slot);
	if (!*error)
		*error = blank_order(box->slot, &order);
	return step;
}

static void create(const struct request *request, const struct create *wanted, const char *label)
{
	struct box *box = calloc(1, sizeof *box);
	int error = -ENOMEM;
	const char *step = "memory";

	if (box) {
		do
			box->number = ++last_box;
		while (boxes[box->number % BOXES] || !box->number);
		box->freezing = -1;
		box->trees = wanted->trees;
		box->shared = wanted->flags & CREATE_SHARED_NETWORK;
		step = start(box, wanted, label, &error);
	}
	if (error) {
		refuse(request->serial, error, step);
		if (box && box->slot)
			slot_discard(box->slot);
		free(box);
		return;
	}
	boxes[box->number % BOXES] = box;
	alive++;
	reply(request->serial, 0, box->number, NULL, 0, (int[]){box->slot->socket, box->slot->pidfd}, 2);
	/* A socket that we held as well would hide from its owner that the sandbox is gone. */
	close_fd(&box->slot->socket);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = box->number};
	epoll_ctl(epoll, EPOLL_CTL_ADD, box->slot->pidfd, &event);
}

/* A copy is under way: its end will be answered. */
static void attend(int number, uint32_t serial)
{
	if (number < 0) {
		refuse(serial, number, "copy");
		return;
	}
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = COPY_EVENT | (uint64_t)number};
	epoll_ctl(epoll, EPOLL_CTL_ADD, snapshot_pidfd(number), &event);
}

/* --- Freezing --------------------------------------------------------------------------------------- */

/* Answers the request under way, if there is one. */
static void freeze_answer(struct box *box, int error)
{
	if (box->freezing < 0)
		return;
	close_fd(&box->freezing);
	if (error)
		refuse(box->freeze_serial, error, "freezer");
	else
		reply(box->freeze_serial, 0, box->number, NULL, 0, NULL, 0);
}

static void freeze(const struct request *request)
{
	struct box *box = box_of(request->number);
	bool wanted = request->kind == REQUEST_FREEZE;
	int error = box && !box->ended ? 0 : -ESTALE;

	if (!error)
		freeze_answer(box, -ECANCELED);
	if (!error)
		error = cgroup_freeze(&box->slot->cgroup, wanted);
	if (!error)
		box->frozen = true;
	int events = error || !wanted ? -1 : cgroup_events(&box->slot->cgroup);
	if (!error && wanted && events < 0)
		error = events;
	if (error) {
		refuse(request->serial, error, "freezer");
		return;
	}
	if (!wanted) {
		reply(request->serial, 0, box->number, NULL, 0, NULL, 0);
		return;
	}
	box->freezing = events;
	box->freeze_serial = request->serial;
	struct epoll_event event = {.events = EPOLLPRI, .data.u64 = FREEZE_EVENT | box->number};
	epoll_ctl(epoll, EPOLL_CTL_ADD, events, &event);
	if (cgroup_is_frozen(events))
		freeze_answer(box, 0);
}

static void forget(struct box *box)
{
	boxes[box->number % BOXES] = NULL;
	free(box);
}

/* PID 1 of the sandbox has ended, and with it all of its processes. */
static void ended(struct box *box)
{
	waitpid(box->slot->pid, NULL, 0);
	box->slot->pid = 0;
	if (box->asked)
		refuse(box->asked, -ESRCH, "network");
	if (box->networked) {
		gate_send(EGRESS_CLOSE, box->number, 0, NULL, 0, NULL);
		close_fd(&box->slot->network); /* not one to be used again */
	}
	/* The owner has it too, so closing alone would not take it out. */
	epoll_ctl(epoll, EPOLL_CTL_DEL, box->slot->pidfd, NULL);
	close_fd(&box->slot->pidfd);
	box->ended = true;
	alive--;
	freeze_answer(box, -ESTALE);
	if (box->frozen)
		cgroup_freeze(&box->slot->cgroup, false); /* for the next who uses it */
	if (box->awaited)
		reply(box->serial, 0, box->number, NULL, 0, NULL, 0);
	/* What was taken stays charged to the group that it was written in. Who wants no parts ready keeps none. */
	if (!box->taken && wanted_ready > 0 && slot_ready() < wanted_ready + 64)
		slot_return(box->slot);
	else
		slot_discard(box->slot);
	box->slot = NULL;
	forget(box);
}

static void destroy(const struct request *request)
{
	struct box *box = box_of(request->number);

	if (!box || box->ended) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0); /* it ended by itself */
		return;
	}
	box->awaited = true;
	box->serial = request->serial;
	pidfd_signal(box->slot->pidfd, SIGKILL);
}

/* --- Layers ----------------------------------------------------------------------------------------- */

static void answer_kept(uint32_t serial, int error, const struct layers *made)
{
	struct {
		struct kept kept;
		uint32_t number[TREES_MAX];
	} text = {.kept = made->kept};

	if (error) {
		refuse(serial, error, "layer");
		return;
	}
	if (made->count && !layers_float())
		slot_undress(); /* they do not see these */
	memcpy(text.number, made->number, sizeof text.number);
	reply(serial, 0, made->count, &text, sizeof text.kept + made->count * sizeof *made->number, NULL, 0);
}

static void copied(int number)
{
	struct layers made;
	uint32_t serial;
	int error = snapshot_ended(number, &made, &serial);

	answer_kept(serial, error, &made);
}

static void snapshot(const struct request *request)
{
	struct box *box = box_of(request->number);
	struct layers made = {.count = 0};
	int error = box && !box->ended ? 0 : -ESTALE;

	if (!error && request->kind == REQUEST_TAKE) {
		error = snapshot_take(box->slot->pidfd, box->trees, &made);
		box->taken = box->taken || !error;
	}
	if (error || request->kind == REQUEST_TAKE) {
		answer_kept(request->serial, error, &made);
		return;
	}
	attend(snapshot_copy(box->slot->pidfd, box->trees, request->serial), request->serial);
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

/* What the sandbox may reach. The egress process answers for us, when nothing else is reached any more. */
static void network(const struct request *request, const char *body)
{
	struct box *box = box_of(request->number);
	int way[WAY_FDS] = {-1, -1, -1}, error = !box || box->ended ? -ESRCH : box->asked ? -EBUSY : box->shared ? -EOPNOTSUPP : 0;
	bool open = !error && request->size > 0 && !box->networked;

	if (!error && !box->networked && !request->size) {
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	}
	/* It takes programs in the kernel, which are root's. */
	if (open)
		error = host.rootless ? -EOPNOTSUPP : gate_open(epoll, EGRESS_EVENT);
	if (open && !error)
		error = network_open(box->slot->network, way);
	if (!error) {
		uint32_t kind = open ? EGRESS_OPEN : request->size ? EGRESS_CHANGE : EGRESS_CLOSE;
		error = gate_send(kind, box->number, request->serial, body, request->size, open ? way : NULL);
	}
	for (int i = 0; i < WAY_FDS; i++)
		close_fd(&way[i]);
	if (error) {
		refuse(request->serial, error, "network");
		return;
	}
	box->networked = true;
	box->opening = open;
	box->closing = request->size == 0;
	box->asked = request->serial;
}

static void answered(void)
{
	struct reply said;

	if (gate_hear(&said)) {
		struct box *box = box_of(said.value);
		if (box && box->asked == said.serial) {
			/* Only now: those in there have to hear that they were cut off. */
			if ((box->closing || (box->opening && said.error)) && !box->ended) {
				network_close(box->slot->network);
				box->networked = false;
			}
			box->asked = 0;
			reply(said.serial, -said.error, said.value, "network", 7, NULL, 0);
		}
		return;
	}
	/* It is gone, and with it what the sandboxes rely on: they end, which their owner hears of. */
	for (uint32_t i = 0; i < BOXES; i++)
		if (boxes[i] && !boxes[i]->ended && boxes[i]->networked)
			pidfd_signal(boxes[i]->slot->pidfd, SIGKILL);
}

static void connect_to(const struct request *request, const struct port *port)
{
	struct box *box = box_of(request->number);
	int made = -ESRCH;

	if (box && !box->ended)
		made = network_connect(box->shared ? -1 : box->slot->network, port->port, port->ipv6);
	if (made < 0)
		refuse(request->serial, made, "connection");
	else
		reply(request->serial, 0, request->number, NULL, 0, &made, 1);
	close_fd(&made);
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
		if (!label_of(request, body) || !sound((const struct create *)(const void *)body))
			break;
		create(request, (const struct create *)(const void *)body, label_of(request, body));
		return;
	case REQUEST_DESTROY:
		destroy(request);
		return;
	case REQUEST_TAKE:
	case REQUEST_COPY:
		snapshot(request);
		return;
	case REQUEST_MERGE:
		if (request->size != sizeof(struct merge) || ((const struct merge *)(const void *)body)->count - 1 >= LAYERS_MAX)
			break;
		attend(snapshot_merge((const struct merge *)(const void *)body, fd, request->serial), request->serial);
		return;
	case REQUEST_FREEZE:
	case REQUEST_THAW:
		freeze(request);
		return;
	case REQUEST_FILL:
		if (request->number > 4096)
			break;
		wanted_ready = request->number;
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	case REQUEST_NETWORK:
		network(request, body);
		return;
	case REQUEST_CONNECT:
		if (request->size != sizeof(struct port))
			break;
		connect_to(request, (const struct port *)(const void *)body);
		return;
	}
	refuse(request->serial, -EPROTO, "request");
}

/* The owner is gone, or wants us gone: nothing may be left. */
static _Noreturn void leave(void)
{
	for (uint32_t i = 0; i < BOXES; i++)
		if (boxes[i] && !boxes[i]->ended)
			pidfd_signal(boxes[i]->slot->pidfd, SIGKILL);
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

_Noreturn void launcher_run(int socket)
{
	struct epoll_event events[64];
	int pause_ms = QUIET_MS;

	owner = socket;
	fcntl(owner, F_SETFD, FD_CLOEXEC);
	prepare();
	epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
	epoll_ctl(epoll, EPOLL_CTL_ADD, owner, &event);
	for (;;) {
		int count = epoll_wait(epoll, events, 64, slot_short(wanted_ready) ? pause_ms : -1);
		/* Nothing to do: make parts for sandboxes to come. */
		if (count == 0)
			pause_ms = slot_prepare(wanted_ready) < 0 ? FAILED_MS : QUIET_MS;
		for (int i = 0; i < count; i++) {
			if (events[i].data.u64 == EGRESS_EVENT) {
				answered();
				continue;
			}
			if (events[i].data.u64 & COPY_EVENT) {
				copied((int)events[i].data.u32);
				continue;
			}
			struct box *box = events[i].data.u32 ? box_of(events[i].data.u32) : NULL;
			if (!events[i].data.u32)
				receive();
			else if (events[i].data.u64 & FREEZE_EVENT) {
				if (box && box->freezing >= 0 && cgroup_is_frozen(box->freezing))
					freeze_answer(box, 0);
			} else if (box && !box->ended)
				ended(box);
		}
	}
}
