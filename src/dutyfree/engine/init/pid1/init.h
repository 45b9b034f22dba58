/* PID 1 of a sandbox: one loop that runs commands, watches them, and does file operations. */
#ifndef DUTYFREE_INIT_H
#define DUTYFREE_INIT_H

#include "protocol.h"

#include <linux/capability.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define CONTROL_FD 3
#define WEIGHT_FD 4 /* where the weight of our control group is written */
#define SERVICE_FD 3 /* of a service: to us, where our own is to the owner */
#define OOM_FD 5 /* where the kernel counts the processes that our memory limit killed */
#define PAYLOAD_FD 6 /* on version 2 of control groups: that of the commands */

#define CAPABILITY(name) (1u << (name))
/* What root of the sandbox can do, in its own user namespace only: as in a Docker container, less what
 * opens more of the kernel (raw sockets, device nodes, chroot, file capabilities). */
#define COMMAND_CAPABILITIES                                                                              \
	(CAPABILITY(CAP_CHOWN) | CAPABILITY(CAP_DAC_OVERRIDE) | CAPABILITY(CAP_FOWNER) |                  \
	 CAPABILITY(CAP_FSETID) | CAPABILITY(CAP_KILL) | CAPABILITY(CAP_SETGID) | CAPABILITY(CAP_SETUID) | \
	 CAPABILITY(CAP_NET_BIND_SERVICE))
/* Init also reads the limits of processes that have changed their user, by which it knows its own. */
#define INIT_CAPABILITIES (COMMAND_CAPABILITIES | CAPABILITY(CAP_SYS_RESOURCE))

enum { EVENT_OWNER, EVENT_CHILDREN, EVENT_BROKER, EVENT_COMMANDS /* and on: two for each command */ };

_Noreturn void init_run(int payload);
extern int payload_group; /* what is started is born there; -1 where that is where we are */

/* --- What is sent (outbox.c) ------------------------------------------------------------------------ */

void outbox_frame(uint16_t kind, uint16_t flags, uint32_t id, const void *a, size_t a_size, const void *b, size_t b_size);
void outbox_frame_fd(uint16_t kind, uint16_t flags, uint32_t id, const void *a, size_t a_size, int fd);
void outbox_done(uint32_t id, int error); /* FRAME_DONE without more */
size_t outbox_size(void);
bool outbox_due(void);                    /* whether what waits should go now */
bool outbox_full(void);                   /* so much waits that nothing further is to be answered */
void outbox_flush(void);                  /* sends what the owner takes now; exits if it is gone */

/* --- Frames that wait for others (frame_queue.c) ---------------------------------------------------------- */

void queue_push(const struct frame *head, const char *payload, int fd); /* to be handled later */
void queue_note_latest(uint32_t id);          /* the owner's latest, which the next may have to wait for */
void queue_complete(uint32_t id, bool ok); /* whatever was asked for under this number */
bool queue_has_dependents(uint32_t id);          /* whether another waits for it */
bool queue_cancel(uint32_t id);
bool queue_ready(void);                 /* whether one need not wait any more */
void queue_run(int (*handle)(const struct frame *head, char *payload, int fd));

/* --- Commands (command.c, exec.c) --------------------------------------------------------------- */

/* Owner's frames; the descriptor is theirs to close. A negative errno refuses the frame. */
int command_exec(uint32_t id, char *payload, size_t size, int input);
int command_terminal(uint32_t id, char *payload, size_t size);
int command_worker(uint32_t id, int (*body)(const char *path, int fd), const char *path, int fd);
/* One that has much to say: what it writes to its descriptor goes to the owner as output. */
int command_streamer(uint32_t id, int (*body)(const char *argument, int fd), const char *argument, uint64_t timeout);
void command_kill(uint32_t id, bool spare);
int command_credit(uint32_t id, const char *payload, size_t size);
int command_signal_all(const char *payload, size_t size);
int command_signal(uint32_t id, const char *payload, size_t size);
int command_postpone(const char *payload, size_t size);

void command_readable(unsigned index, int stream); /* an event on a command's pipe */
void command_resume_reading(void);                        /* the way to the owner is free again */
void command_reap(void);                           /* some child ended */
bool command_running(void);
uint64_t command_next_deadline(void);                       /* the next deadline, UINT64_MAX for none */
void command_deadlines(void);
void command_open(int epoll);
void command_prepare(void);                        /* does beforehand what a command will need */

/* --- Services, and commands that are forks of them (service_calls.c, await_ready.c) ---------------------------------- */

#define EVENT_CALLS (1u << 20)

int service_start(uint32_t id, char *payload, size_t size, int input);
int call_start(uint32_t id, char *payload, size_t size, int input);
void call_event(uint64_t index); /* a fork says something */
void call_open(int epoll);
int await_start(uint32_t id, char *payload, size_t size);

/* --- Starting and killing (process.c) --------------------------------------------------------------- */

struct start {
	char *const *arguments, *const *environment;
	const char *user, *directory;
	int input, output, errors;
	bool terminal;      /* the input is one, and to be the controlling one */
	int socket;         /* a service's own, to be its descriptor 3; 0 for none */
	uint64_t mark;      /* by which the process and its descendants are known */
	uint64_t executing; /* when its program began */
	uint32_t flags; /* EXIT_… why it did not start */
	int error;
};

pid_t process_start(struct start *start); /* -1 with flags and error set */
uint64_t process_mark(void);              /* one that no process has had */
int process_set_mark(pid_t pid, uint64_t mark); /* on it, 0 for ourselves: 0 or -errno */
void process_kill_marked(uint64_t mark, pid_t spared); /* all of them but one, at once */

/* --- Files (files.c, tree_stream.c) --------------------------------------------------------------------- */

int file_read(uint32_t id, const char *path);
int file_write(uint32_t id, const char *payload, size_t size, int source);
int file_list(uint32_t id, const char *path);
int file_remove(uint32_t id, const char *path);
int transfer_error(int fd, int error); /* the errno to tell of a read or write that failed */
int make_parents(char *path);
int remove_tree(const char *path, int unused);
int tree_unpack(const char *path, int fd);
int tree_pack(const char *path, int fd);

/* --- Further actions, each in a file of its name ----------------------------------------------------- */

int edit_file(uint32_t id, const char *payload, size_t size);
int search_start(uint32_t id, char *payload, size_t size);
int watch_start(uint32_t id, const char *payload, size_t size);

/* --- Turns on the processor (priority.c) ------------------------------------------------------------- */

void priority_open(bool unified);
void priority_begin(uint64_t time);  /* a command begins */
uint64_t priority_next(void);        /* when to look again, UINT64_MAX for never */
void priority_update(bool running);    /* look */
int priority_background(const char *payload, size_t size); /* whether to, before all that wait */

/* --- Processes that the memory limit killed (oom.c) ---------------------------------------------------- */

void oom_open(void);
uint64_t oom_reported(void);           /* the count as the owner knows it */
bool oom_report(uint64_t since);     /* whether there were any since that count; the owner knows them then */

/* --- Whether it is as new (verify.c) ------------------------------------------------------------------ */

void verify_open(void); /* remembers how it is */
int verify_all(uint32_t id, const char *payload, size_t size);

#endif
