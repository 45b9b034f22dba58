#include "egress/egress.h"

#include "egress/netns.h"
#include "sys.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/rtnetlink.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LAUNCHER_FD 3
#define ROUTES_FD 4
#define EGRESS_ID ((1u << 30) - 1) /* below the ids of sandboxes, and far above all others */
#define EVENTS_PER_TURN 16         /* events of one sandbox per turn */
#define EVENTS_BATCH 256           /* events from the kernel at once */
#define TICK_MS 250                /* while a lookup is active, or a listener is paused */

/* One epoll for all. Nested epolls would give fairness for free, but adding to them takes a lock of the whole kernel
 * (epnested_mutex), which a sandbox can hold for long by nesting its own. */
static int epoll;
static struct client *clients;
static struct client *busy, **busy_end = &busy; /* clients with ready events, in the order of their turns */
static bool fds_exhausted;                      /* some listeners are paused */
static bool fd_released;                        /* a descriptor was closed since the last check */

/* --- Ready events and turns ---------------------------------------------------------------------- */

static void ready_push(struct watch *watch, uint32_t events)
{
	struct client *client = watch->client;

	watch->events = events;
	watch->armed = false;
	watch->next = NULL;
	watch->link = client->ready_end;
	*client->ready_end = watch;
	client->ready_end = &watch->next;
}

static void ready_remove(struct watch *watch)
{
	if (!watch->link)
		return;
	*watch->link = watch->next;
	if (watch->next)
		watch->next->link = watch->link;
	else
		watch->client->ready_end = watch->link;
	watch->link = NULL;
}

static void enqueue_client(struct client *client)
{
	if (client->busy)
		return;
	client->busy = true;
	client->next_busy = NULL;
	*busy_end = client;
	busy_end = &client->next_busy;
}

static void dequeue_client(const struct client *client)
{
	struct client **link = &busy;

	while (*link && *link != client)
		link = &(*link)->next_busy;
	if (!*link)
		return;
	*link = client->next_busy;
	if (!*link)
		busy_end = link;
}

void watch_set(struct client *client, struct watch *watch, uint32_t interest)
{
	struct epoll_event event = {.events = interest | EPOLLONESHOT, .data.ptr = watch};
	int operation = !interest ? EPOLL_CTL_DEL : watch->interest ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
	bool waits = interest && watch->link; /* it is in the ready list; serving arms it */

	if (interest == watch->interest && (watch->armed || !interest))
		return;
	if (!waits && epoll_ctl(epoll, operation, watch->fd, &event) < 0)
		abort(); /* the launcher sees the process end */
	if (!interest)
		ready_remove(watch);
	watch->client = client;
	watch->interest = interest;
	watch->armed = interest && !waits;
}

/* Without free descriptors, a listener with pending connections would wake us again and again. */
void listener_pause(struct client *client)
{
	watch_set(client, &client->listener, 0);
	fds_exhausted = true;
}

static void listeners_resume(void)
{
	fds_exhausted = false;
	for (struct client *client = clients; client; client = client->next)
		watch_set(client, &client->listener, EPOLLIN);
}

void egress_free(void *memory)
{
	free(memory);
	fd_released = true;
}

socklen_t socket_address(const struct in6_addr *address, uint16_t port, struct sockaddr_storage *result)
{
	struct sockaddr_in *v4 = (struct sockaddr_in *)result;
	struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)result;

	memset(result, 0, sizeof *result);
	if (IN6_IS_ADDR_V4MAPPED(address)) {
		v4->sin_family = AF_INET;
		v4->sin_port = htons(port);
		memcpy(&v4->sin_addr, address->s6_addr + 12, 4);
		return sizeof *v4;
	}
	v6->sin6_family = AF_INET6;
	v6->sin6_port = htons(port);
	v6->sin6_addr = *address;
	return sizeof *v6;
}

/* Ask the kernel's routing table where packets to this address go. A list of our own would be out of date. */
static bool is_local_route(const struct in6_addr *address)
{
	bool v4 = IN6_IS_ADDR_V4MAPPED(address);
	uint16_t size = v4 ? 4 : 16;
	struct {
		struct nlmsghdr head;
		struct rtmsg body;
		struct rtattr destination;
		uint8_t address[16];
	} question = {
		.head = {.nlmsg_len = (uint32_t)(NLMSG_LENGTH(sizeof(struct rtmsg)) + RTA_LENGTH(size)),
			 .nlmsg_type = RTM_GETROUTE,
			 .nlmsg_flags = NLM_F_REQUEST},
		.body = {.rtm_family = v4 ? AF_INET : AF_INET6, .rtm_dst_len = (uint8_t)(size * 8)},
		.destination = {.rta_len = (uint16_t)RTA_LENGTH(size), .rta_type = RTA_DST},
	};
	union {
		struct nlmsghdr head;
		char bytes[4096];
	} answer;

	memcpy(question.address, address->s6_addr + (v4 ? 12 : 0), size);
	if (send(ROUTES_FD, &question, question.head.nlmsg_len, 0) < 0)
		return true;
	ssize_t got = recv(ROUTES_FD, &answer, sizeof answer, 0);
	if (got < 0 || !NLMSG_OK(&answer.head, got))
		return true;
	/* No route: connect() will report it. */
	if (answer.head.nlmsg_type != RTM_NEWROUTE)
		return false;
	return ((const struct rtmsg *)NLMSG_DATA(&answer.head))->rtm_type != RTN_UNICAST;
}

bool is_host_address(const struct in6_addr *address)
{
	struct in6_addr inner[EMBEDDED_MAX];
	bool here = is_local_route(address);

	for (unsigned count = policy_embedded(address, inner); !here && count > 0; count--)
		here = is_local_route(&inner[count - 1]);
	return here;
}

/* --- Clients ------------------------------------------------------------------------------------- */

static struct client *client_find(uint32_t number)
{
	struct client *client = clients;

	while (client && client->number != number)
		client = client->next;
	return client;
}

static void client_close(struct client *client)
{
	struct client **link = &clients;

	relay_close_all(client);
	lookup_cancel_all(client);
	while (*link != client)
		link = &(*link)->next;
	*link = client->next;
	dequeue_client(client);
	/* Other processes may hold these sockets too; epoll would go on to report them. */
	watch_set(client, &client->listener, 0);
	watch_set(client, &client->resolver, 0);
	close(client->listener.fd);
	close(client->resolver.fd);
	close(client->program);
	policy_free(&client->policy);
	egress_free(client);
}

static int client_open(uint32_t number, const void *body, size_t size, const int fds[EGRESS_FDS])
{
	struct client *client = calloc(1, sizeof *client);
	int error = client ? policy_parse(&client->policy, body, size) : -ENOMEM;

	if (error) {
		for (int i = 0; i < EGRESS_FDS; i++)
			close(fds[i]);
		if (client) {
			policy_free(&client->policy);
			free(client);
		}
		return error;
	}
	client->number = number;
	client->program = fds[EGRESS_FD_PROGRAM];
	client->ready_end = &client->ready;
	client->listener = (struct watch){.kind = WATCH_LISTENER, .fd = fds[EGRESS_FD_LISTENER]};
	client->resolver = (struct watch){.kind = WATCH_RESOLVER, .fd = fds[EGRESS_FD_RESOLVER]};
	watch_set(client, &client->listener, EPOLLIN);
	watch_set(client, &client->resolver, EPOLLIN);
	client->next = clients;
	clients = client;
	return 0;
}

static int client_update(struct client *client, const void *body, size_t size)
{
	struct policy policy = {.size = 0};
	int error = policy_parse(&policy, body, size);

	if (error)
		return error;
	relay_close_all(client);
	lookup_cancel_all(client);
	policy_free(&client->policy);
	client->policy = policy;
	return 0;
}

static void serve_client(struct client *client)
{
	for (int i = 0; i < EVENTS_PER_TURN && client->ready; i++) {
		struct watch *watch = client->ready;
		ready_remove(watch);
		switch (watch->kind) {
		case WATCH_LISTENER:
			relay_accept(client);
			watch_set(client, watch, watch->interest);
			break;
		case WATCH_RESOLVER:
			lookup_receive(client);
			watch_set(client, watch, watch->interest);
			break;
		case WATCH_LOOKUP:
			lookup_event(client, watch);
			break;
		default:
			relay_event(client, watch, watch->events);
		}
	}
}

/* Serve each client with ready events once. */
static void serve_clients(void)
{
	struct client *client = busy;

	busy = NULL;
	busy_end = &busy;
	for (struct client *next; client; client = next) {
		next = client->next_busy;
		client->busy = false;
		serve_client(client);
		if (client->ready)
			enqueue_client(client);
	}
}

/* --- Requests of the launcher -------------------------------------------------------------------- */

static int handle_request(const struct request *request, const void *body, const int *fds, size_t count)
{
	struct client *client = client_find(request->number);

	if (request->kind == EGRESS_OPEN && !client && count == EGRESS_FDS)
		return client_open(request->number, body, request->size, fds);
	for (size_t i = 0; i < count; i++)
		close(fds[i]);
	if (request->kind == EGRESS_UPDATE && client)
		return client_update(client, body, request->size);
	if (request->kind == EGRESS_OPEN && !client)
		return -EMFILE; /* we ran out of descriptors, so the message came without them */
	if (request->kind != EGRESS_CLOSE)
		return -EPROTO;
	if (client)
		client_close(client);
	return 0;
}

static void receive_request(void)
{
	static union {
		struct request head;
		char bytes[REQUEST_MAX];
	} message;
	int fds[EGRESS_FDS];
	size_t count;
	ssize_t size = receive_message(LAUNCHER_FD, &message, sizeof message, 0, fds, EGRESS_FDS, &count);

	if (size < 0 && errno == EINTR)
		return;
	/* The launcher is gone, and all sandboxes with it. */
	if (size < (ssize_t)sizeof message.head || message.head.size != (size_t)size - sizeof message.head)
		_exit(0);
	int error = handle_request(&message.head, message.bytes + sizeof message.head, fds, count);
	struct reply reply = {.serial = message.head.serial, .error = -error, .value = message.head.number};
	if (reply.serial)
		send_message(LAUNCHER_FD, &reply, sizeof reply, NULL, 0, NULL, 0);
}

/* --- The process --------------------------------------------------------------------------------- */

static int create_epoll(void)
{
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};

	epoll = epoll_create1(EPOLL_CLOEXEC); /* before seccomp forbids it */
	return epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, LAUNCHER_FD, &event) < 0 ? -errno : 0;
}

static void enter_process(int launcher)
{
	int routes = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);
	sigset_t all;

	prctl(PR_SET_NAME, "dutyfree-egress");
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	/* First move both up: the target of one may be the place of the other. */
	launcher = fcntl(launcher, F_DUPFD_CLOEXEC, 64);
	routes = fcntl(routes, F_DUPFD_CLOEXEC, 64);
	if (launcher < 0 || routes < 0 || dup3(launcher, LAUNCHER_FD, O_CLOEXEC) < 0 ||
	    dup3(routes, ROUTES_FD, O_CLOEXEC) < 0 || syscall(SYS_close_range, ROUTES_FD + 1, ~0u, 0) < 0 ||
	    relay_prepare() < 0 || create_epoll() < 0)
		_exit(71);
	if (setgroups(0, NULL) < 0 || setresgid(EGRESS_ID, EGRESS_ID, EGRESS_ID) < 0 ||
	    setresuid(EGRESS_ID, EGRESS_ID, EGRESS_ID) < 0 ||
	    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) < 0 ||
	    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) < 0)
		_exit(71);
	egress_seccomp_enter();
}

/* Move all ready events into the queues of their clients, so that no client waits behind another's events. Returns
 * whether the launcher has sent a request. */
static bool collect_events(int wait_ms)
{
	static struct epoll_event events[EVENTS_BATCH];
	bool has_request = false;
	int count;

	do {
		count = epoll_wait(epoll, events, EVENTS_BATCH, wait_ms);
		for (int i = 0; i < count; i++) {
			struct watch *watch = events[i].data.ptr;
			if (!watch) {
				has_request = true;
				continue;
			}
			ready_push(watch, events[i].events);
			enqueue_client(watch->client);
		}
		wait_ms = 0;
	} while (count == EVENTS_BATCH);
	return has_request;
}

static _Noreturn void run(void)
{
	for (uint64_t swept = 0;;) {
		bool ticking = fds_exhausted || lookup_total() > 0;
		/* Requests of the launcher come first. */
		if (collect_events(busy ? 0 : ticking ? TICK_MS : -1))
			receive_request();
		serve_clients();
		uint64_t moment = now();
		bool tick = ticking && moment - swept > TICK_MS * 1000000ull;
		if (tick) {
			swept = moment;
			for (struct client *client = clients; client; client = client->next)
				lookup_retry(client, moment);
		}
		/* Something may have closed descriptors: we, or another process on the host. */
		if (fds_exhausted && (fd_released || tick))
			listeners_resume();
		fd_released = false;
	}
}

int egress_start(pid_t *pid)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	*pid = fork();
	if (*pid == 0) {
		enter_process(pair[1]);
		run();
	}
	int error = *pid < 0 ? -errno : 0;
	close(pair[1]);
	if (error)
		close(pair[0]);
	return error ? error : pair[0];
}
