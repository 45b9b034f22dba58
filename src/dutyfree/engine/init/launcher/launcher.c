#include "launcher/launcher.h"

#include "egress/client.h"
#include "launcher/disk.h"
#include "launcher/fd_handover.h"
#include "launcher/host.h"
#include "launcher/host_probe.h"
#include "launcher/keep.h"
#include "launcher/layers.h"
#include "launcher/sandboxes.h"
#include "launcher/slot.h"
#include "launcher/snapshot.h"
#include "launcher/title.h"
#include "protocol.h"
#include "setup/sandbox.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define IDLE_MS 2        /* idle time before a slot is prepared: let the first command of a new sandbox run */
#define RETRY_MS 1000    /* after an error, until the next try */
#define FILES (1u << 20) /* default hard maximum for root (fs.nr_open) */

int launcher_epoll;
static int owner; /* -1 while sandboxes wait for a new one (keep.c) */
static unsigned slots_target;

void reply(uint32_t serial, int error, uint32_t value, const void *text, size_t size, const int *fds, int count)
{
	struct reply head = {.serial = serial, .error = error < 0 ? -error : 0, .value = value, .size = (uint32_t)size};

	/* If the owner is gone, its socket reports that soon. */
	send_message(owner, &head, sizeof head, text, size, fds, count);
}

void refuse(uint32_t serial, int error, const char *step)
{
	reply(serial, error, 0, step, strlen(step), NULL, 0);
}

static void add_layer(const struct request *request, const char *path, int lock)
{
	int directory = -1, number;

	if (request->kind == REQUEST_SCRATCH)
		number = layer_add_scratch(&directory);
	else
		number = layer_add_host(path);
	if (number > 0 && lock >= 0) {
		int error = layer_hold((uint32_t)number, lock);
		if (error) {
			layer_remove((uint32_t)number);
			number = error;
		}
	}
	if (number < 0) {
		refuse(request->serial, number, "cannot mount the layer");
		return;
	}
	reply(request->serial, 0, (uint32_t)number, NULL, 0, &directory, directory >= 0);
	close_fd(&directory);
	slot_kill_parked(); /* their mount namespaces lack the new layer */
}

static void keep(const struct request *request, int fd)
{
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 3), error = own < 0 ? -errno : keep_listen(own);

	reply(request->serial, error, 0, NULL, 0, NULL, 0);
}

static void add_disk(const struct request *request, const char *body, int fd)
{
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 3), error = own < 0 ? -errno : 0;
	uint64_t size;

	if (!error && request->kind == REQUEST_DISK)
		error = disk_open(own);
	if (!error && request->kind == REQUEST_TEMPLATE) {
		memcpy(&size, body, sizeof size);
		disk_add_template(own, size, request->serial);
		return;
	}
	reply(request->serial, error, 0, NULL, 0, NULL, 0);
}

static void handle_request(const struct request *request, const char *body, int fd)
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
		add_layer(request, body, fd);
		return;
	case REQUEST_SCRATCH:
		add_layer(request, NULL, -1);
		return;
	case REQUEST_REMOVE_LAYER:
		if (layer_detached_fd(request->number) < 0)
			slot_kill_parked(); /* their mount namespaces would keep it */
		error = layer_remove(request->number);
		reply(request->serial, error, request->number, NULL, 0, NULL, 0);
		return;
	case REQUEST_CREATE:
		sandbox_create(request, body);
		return;
	case REQUEST_DESTROY:
		sandbox_destroy(request);
		return;
	case REQUEST_SNAPSHOT_MOVE:
	case REQUEST_SNAPSHOT_COPY:
		sandbox_snapshot(request);
		return;
	case REQUEST_MERGE:
		snapshot_merge_request(request, body, fd);
		return;
	case REQUEST_FREEZE:
	case REQUEST_THAW:
		sandbox_freeze(request);
		return;
	case REQUEST_AUDIT:
		sandbox_audit(request);
		return;
	case REQUEST_SLOTS:
		if (request->number > 4096)
			break;
		slots_target = request->number;
		disk_set_ready(slots_target);
		disk_prepare();
		reply(request->serial, 0, request->number, NULL, 0, NULL, 0);
		return;
	case REQUEST_DISK:
	case REQUEST_TEMPLATE:
		if (fd < 0 || host.rootless || request->size != (request->kind == REQUEST_DISK ? 0 : sizeof(uint64_t)))
			break;
		add_disk(request, body, fd);
		return;
	case REQUEST_KEEP:
		if (fd >= 0)
			keep(request, fd);
		else
			keep_stop(request);
		return;
	case REQUEST_LEASE: {
		uint64_t until;
		if (request->size != sizeof until)
			break;
		memcpy(&until, body, sizeof until);
		keep_set_lease(request, until);
		return;
	}
	case REQUEST_ADOPT:
		keep_adopt(request);
		return;
	case REQUEST_SWEEP:
		if (request->size % sizeof(uint32_t))
			break;
		keep_sweep(request, (const uint32_t *)(const void *)body, request->size / sizeof(uint32_t));
		return;
	case REQUEST_NETWORK:
		sandbox_network(request, body);
		return;
	case REQUEST_CONNECT:
		if (request->size != sizeof(struct port))
			break;
		sandbox_connect(request, (const struct port *)(const void *)body);
		return;
	}
	refuse(request->serial, -EPROTO, "malformed request");
}

/* No one needs us any more: kill all sandboxes and remove everything. */
static _Noreturn void shut_down(void)
{
	uint32_t at = 0;
	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		pidfd_signal(sandbox->slot->pidfd, SIGKILL);
	slot_kill_parked();
	at = 0;
	for (struct sandbox *sandbox; (sandbox = sandbox_next(&at));)
		if (sandbox->disk) {
			waitpid(sandbox->slot->pid, NULL, 0);
			disk_dispose(&sandbox->upper, !sandbox->upper_taken && !sandbox->upper_copied);
		}
	disk_close();
	snapshot_kill_all();
	egress_client_close();
	while (wait(NULL) > 0 || errno == EINTR)
		;
	cgroup_close();
	_exit(0);
}

/* The owner is gone, or has closed the socket. */
static void lose_owner(void)
{
	if (!host.keeps)
		shut_down();
	/* Another descriptor may refer to the same socket, so closing ours would not remove it from epoll. */
	epoll_ctl(launcher_epoll, EPOLL_CTL_DEL, owner, NULL);
	close_fd(&owner);
	slots_target = 0;
	title_set_owner(0);
	keep_orphan();
}

static void receive(void)
{
	static union {
		struct request head;
		char bytes[REQUEST_MAX];
	} message;
	AUTOCLOSE int fd = -1;
	size_t count;
	ssize_t size = receive_message(owner, &message, sizeof message, MSG_TRUNC, &fd, 1, &count);

	if (size < 0 && (errno == EINTR || errno == EAGAIN))
		return;
	if (size <= 0) {
		lose_owner();
		return;
	}
	if ((size_t)size < sizeof message.head || (size_t)size > sizeof message ||
	    message.head.size != (size_t)size - sizeof message.head) {
		refuse((size_t)size < sizeof message.head ? 0 : message.head.serial, -EPROTO, "malformed request");
		return;
	}
	handle_request(&message.head, message.bytes + sizeof message.head, fd);
}

static void take_owner(void)
{
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
	int fd = keep_accept();

	if (fd < 0)
		return;
	/* A killed owner may be replaced before we have read its last requests and the end of its socket. */
	while (owner >= 0 && poll(&(struct pollfd){.fd = owner, .events = POLLRDHUP}, 1, 0) > 0)
		receive();
	if (owner >= 0 || epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
		close(fd);
		return;
	}
	owner = fd;
	struct ucred peer = {0};
	getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &(socklen_t){sizeof peer});
	title_set_owner(peer.pid);
}

static void prepare(void)
{
	struct rlimit files;
	sigset_t all;

	/* Ctrl-C is for the owner. When the owner ends, we end. */
	setsid();
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	prctl(PR_SET_NAME, "dutyfree-engine");
	const char *step = "cannot create a user namespace";
	int error = host_enter(); /* while we are dumpable: newuidmap must open our /proc files */
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	/* Three descriptors per sandbox: raise the hard limit if we may, else use all of it. */
	files = (struct rlimit){FILES, FILES};
	if (setrlimit(RLIMIT_NOFILE, &files) < 0 && getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);
#ifdef __SANITIZE_ADDRESS__
	const int silent = 1; /* keep stderr for the sanitizer's reports */
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
		step = "cannot open /proc";
		error = -errno;
	}
	if (!error && host.without && host.rootless) {
		step = "isolation cannot be reduced without root";
		error = -EPERM;
	}
	if (!error && suid_dumpable_is_on()) {
		step = "fs.suid_dumpable is 1, so a sandbox could read the memory of its PID 1; set it to 0 or 2";
		error = -EPERM;
	}
	if (!error) {
		step = "cannot set up control groups";
		error = cgroup_open(proc);
	}
	if (!error) {
		step = "cannot prepare namespaces and user ids";
		error = slot_open(proc);
	}
	if (!error) {
		step = "cannot create a mount namespace";
		error = layers_open(proc);
	}
	if (error) {
		refuse(0, error, step);
		cgroup_close();
		_exit(70);
	}
	setup_prepare(proc);
	seccomp_prepare();
}

static void handle_event(uint64_t event)
{
	struct sandbox *sandbox = (uint32_t)event ? sandbox_find((uint32_t)event) : NULL;

	if (event == 0 && owner >= 0)
		receive();
	else if (event == KEEP_EVENT)
		take_owner();
	else if (event == EGRESS_EVENT)
		egress_replied();
	else if (event == DISK_EVENT)
		disk_replied();
	else if (event == DISPOSED_EVENT)
		disk_disposed();
	else if (event == DISPOSER_EVENT)
		disk_send_disposals();
	else if (event & SNAPSHOT_EVENT)
		snapshot_job_ended((uint32_t)event);
	else if (sandbox && event & FREEZE_EVENT)
		freeze_check(sandbox);
	else if (sandbox && !sandbox->ended)
		sandbox_ended(sandbox, slots_target);
}

_Noreturn void launcher_run(int socket, unsigned without)
{
	struct epoll_event events[64];
	int pause_ms = IDLE_MS;

	owner = socket;
	host.without = without;
	fcntl(owner, F_SETFD, FD_CLOEXEC);
	prepare();
	launcher_epoll = epoll_create1(EPOLL_CLOEXEC);
	struct epoll_event event = {.events = EPOLLIN, .data.u64 = 0};
	if (launcher_epoll < 0 || epoll_ctl(launcher_epoll, EPOLL_CTL_ADD, owner, &event) < 0) {
		refuse(0, -errno, "cannot create an epoll instance");
		shut_down();
	}
	for (;;) {
		int freeze_ms = freeze_wait_ms();
		bool short_of_parts = slot_needs_parked(slots_target) || disk_lacks_ready();
		int wait_ms = freeze_ms >= 0 ? freeze_ms : short_of_parts ? pause_ms : owner < 0 ? keep_wait_ms() : -1;
		int count = epoll_wait(launcher_epoll, events, 64, wait_ms);
		if (freeze_ms >= 0)
			freeze_poll();
		if (count == 0 && freeze_ms != 1 && short_of_parts) { /* idle: prepare parts */
			disk_prepare();
			pause_ms = IDLE_MS;
			if (slot_needs_parked(slots_target) && slot_prepare(slots_target) < 0)
				pause_ms = RETRY_MS;
		}
		for (int i = 0; i < count; i++)
			handle_event(events[i].data.u64);
		if (owner < 0 && !keep_end_expired())
			shut_down();
	}
}
