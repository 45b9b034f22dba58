/* pid1/: init, PID 1 of a sandbox. One event loop that runs commands and file operations for the owner.
 *
 * init.c is the loop; frame_queue.c, input.c and outbox.c are the frames in and out. A command: exec.c, process.c, command.c,
 * output.c. Actions on files: files.c, tree_stream.c, edit.c, search.c, watch.c. Services: service_calls.c,
 * await_ready.c. Also priority.c (CPU weight), oom.c (OOM kills), verify.c (reset checks) and seccomp_broker.c (system
 * calls that init decides). Start reading at init_run(). */
#pragma once

#include "protocol.h"

#include <linux/capability.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define CONTROL_FD 3
#define WEIGHT_FD 4  /* CPU weight of our control group, to write */
#define SERVICE_FD 3 /* in a service: its socket to init */
#define OOM_FD 5     /* file with the OOM kill count of our control group */
#define PAYLOAD_FD 6 /* cgroup v2: the directory of our control group */
#define ANSWER_FD 7  /* as a guest: where answers go */
#define KEEPER_FD 8  /* if we outlive the owner: the launcher sends the socket of a new one */

#define CAPABILITY(name) (1u << (name))
/* Capabilities of root in the sandbox, valid in its user namespace only: Docker's defaults without raw sockets, device
 * nodes, chroot and file capabilities. */
#define COMMAND_CAPABILITIES                                                                              \
	(CAPABILITY(CAP_CHOWN) | CAPABILITY(CAP_DAC_OVERRIDE) | CAPABILITY(CAP_FOWNER) |                  \
	 CAPABILITY(CAP_FSETID) | CAPABILITY(CAP_KILL) | CAPABILITY(CAP_SETGID) | CAPABILITY(CAP_SETUID) | \
	 CAPABILITY(CAP_NET_BIND_SERVICE))
/* Init also reads the rlimits of processes that have changed their user, to find marks (process.c). */
#define INIT_CAPABILITIES (COMMAND_CAPABILITIES | CAPABILITY(CAP_SYS_RESOURCE))

enum { EVENT_OWNER, EVENT_CHILDREN, EVENT_BROKER, EVENT_KEEPER, EVENT_COMMANDS /* and the following: two for each command */ };

_Noreturn void init_run(int payload, bool kept);
void owner_deaf(void); /* the owner does not read any more: exits, unless we outlive it */
extern bool answers_apart; /* answers go to ANSWER_FD, and that is another file than CONTROL_FD */
extern int payload_group; /* cgroup v2: processes start in this group; -1 on v1 */

/* --- Frames to the owner (outbox.c) -------------------------------------------------------------- */

void outbox_frame(uint16_t kind, uint16_t flags, uint32_t id, const void *a, size_t a_size, const void *b, size_t b_size);
void outbox_frame_fd(uint16_t kind, uint16_t flags, uint32_t id, const void *a, size_t a_size, int fd);
void outbox_done(uint32_t id, int error); /* FRAME_DONE without a result */
size_t outbox_size(void);
bool outbox_due(void);   /* whether it should be sent now */
bool outbox_full(void);  /* handle no further frames until it is sent */
void outbox_flush(void); /* send what the socket takes */
void outbox_clear(void); /* the owner is gone: drop what was not sent */

/* --- In-band input (input.c) --------------------------------------------------------------------- */

#define EVENT_INPUTS (1u << 21)

void input_open_table(int epoll);
int input_open(uint32_t id); /* a descriptor to read the input of this request from, or -errno */
int input_add(uint32_t id, const char *data, size_t size);
void input_event(uint64_t index);
void input_end(uint32_t id); /* its request has ended */

/* --- Queued frames (frame_queue.c) --------------------------------------------------------------- */

void queue_push(const struct frame *head, const char *payload, int fd); /* handle it later */
void queue_note_latest(uint32_t id); /* the next frame may wait for this one */
void queue_complete(uint32_t id, bool ok); /* the request with this id has ended */
bool queue_has_dependents(uint32_t id); /* whether a frame waits for it */
bool queue_cancel(uint32_t id);
void queue_clear(void);
bool queue_ready(void); /* whether a frame can be handled now */
void queue_run(int (*handle)(const struct frame *head, char *payload, int fd));

/* --- Commands (command.c, exec.c) ---------------------------------------------------------------- */

/* Handlers of frames. They do not close the descriptor. A negative errno fails the frame. */
int command_exec(uint32_t id, char *payload, size_t size, int input);
int command_terminal(uint32_t id, char *payload, size_t size);
int command_worker(uint32_t id, int (*body)(const char *path, int fd), const char *path, int fd);
/* A worker that sends output: what it writes to its descriptor goes to the owner. */
int command_streamer(uint32_t id, int (*body)(const char *argument, int fd), const char *argument, uint64_t timeout);
void command_kill(uint32_t id, bool spare);
int command_credit(uint32_t id, const char *payload, size_t size);
int command_signal_all(const char *payload, size_t size);
int command_signal(uint32_t id, const char *payload, size_t size);
int command_postpone(const char *payload, size_t size);
void command_adopted(void); /* tell a new owner which commands run, and let them print again */

void command_readable(unsigned index, int stream); /* a command's pipe is readable */
void command_resume_reading(void);                 /* the outbox has room again */
void command_reap(void);                           /* a child has ended */
bool command_running(void);
uint64_t command_next_deadline(void); /* UINT64_MAX for none */
void command_deadlines(void);
void command_open(int epoll);
void command_prepare(void); /* create in advance what the next command needs */

/* --- Services and calls (service_calls.c, await_ready.c) ----------------------------------------- */

#define EVENT_CALLS (1u << 20)

int service_start(uint32_t id, char *payload, size_t size, int input);
int call_start(uint32_t id, char *payload, size_t size, int input);
void call_event(uint64_t index); /* a fork's socket is readable */
void call_open(int epoll);
int await_start(uint32_t id, char *payload, size_t size);

/* --- Processes (process.c) ----------------------------------------------------------------------- */

struct start {
	char *const *arguments, *const *environment;
	const char *user, *directory;
	int input, output, errors;
	bool terminal;      /* the input is a terminal, to become the controlling one */
	int socket;         /* of a service, becomes its descriptor 3; 0 for none */
	uint64_t mark;      /* identifies the process and its descendants */
	uint64_t executing; /* time of its exec */
	uint32_t flags;     /* EXIT_…: why it did not start */
	int error;
};

pid_t process_start(struct start *start);              /* -1 with flags and error set */
void process_choose_mark(void);                        /* as a guest: by what this kernel offers */
uint64_t process_mark(void);                           /* a new unique mark */
int process_set_mark(pid_t pid, uint64_t mark);        /* pid 0 for ourselves: 0 or -errno */
void process_kill_marked(uint64_t mark, pid_t spared); /* SIGKILL to all but one */
unsigned process_signal_descendants(int number);       /* how many there are */

/* --- Files (files.c, tree_stream.c) -------------------------------------------------------------- */

int file_read(uint32_t id, const char *path);
int file_write(uint32_t id, const char *payload, size_t size, int source);
int file_list(uint32_t id, const char *path);
int file_remove(uint32_t id, const char *path);
int transfer_error(int fd, int error); /* the errno to report for a failed read or write */
int make_parents(char *path);
int remove_tree(const char *path, int unused);
int tree_unpack(const char *path, int fd);
int tree_pack(const char *path, int fd);

/* --- Other actions, each in its own file --------------------------------------------------------- */

int edit_file(uint32_t id, const char *payload, size_t size);
int search_start(uint32_t id, char *payload, size_t size);
int watch_start(uint32_t id, const char *payload, size_t size);

/* --- CPU priority (priority.c) ------------------------------------------------------------------- */

void priority_open(bool is_v2);
void priority_begin(uint64_t time); /* a command starts */
uint64_t priority_next(void);       /* time of the next update, UINT64_MAX for none */
void priority_update(bool running);
int priority_background(const char *payload, size_t size); /* u32: 1 for the lowest CPU weight */

/* --- OOM kills (oom.c) --------------------------------------------------------------------------- */

void oom_open(void);
uint64_t oom_reported(void);     /* kills that the owner knows of */
bool oom_report(uint64_t since); /* whether there are more than `since`; marks them as reported */

/* --- Reset checks (verify.c) --------------------------------------------------------------------- */

void verify_open(void); /* remember the fresh state */
int verify_all(uint32_t id, const char *payload, size_t size);
