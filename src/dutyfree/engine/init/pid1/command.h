/* One running command. exec.c starts it, command.c looks after it, output.c handles its output. */
#pragma once

#include "pid1/init.h"

struct stream {
	int fd;         /* -1 at end of file */
	bool unwatched; /* removed from epoll: its output cannot be taken now */
	uint64_t total, passed;
	char *buffer; /* for the next frame */
	size_t used;
	char *tail; /* ring buffer of the last bytes; the next goes to tail_total % size */
	uint64_t tail_total;
};

/* A call of a service. Kept until the end, because a fork that dies before it begins is replaced. */
struct call {
	uint32_t service;
	int descriptors[4]; /* stdin, stdout, stderr, and the file with struct exec */
	int socket;         /* to the fork that runs it, -1 while it waits for one */
	unsigned tries;
};

struct command {
	uint32_t id;
	pid_t pid; /* 0 for a call without a fork */
	bool worker;
	struct call *call;
	struct exec request;
	uint64_t mark, deadline;
	int64_t credit; /* may be negative after a large read */
	uint64_t oom;   /* OOM kills that the owner knew of when it started */
	struct exit result;
	struct stream streams[2];
};

/* A new entry in the table of commands, and its index. NULL if the table is full or has this id. */
struct command *command_new(uint32_t id, unsigned *index);
void command_watch_stream(unsigned index, int number, bool on, int operation); /* add or remove a stream in epoll */
void command_finish(unsigned index); /* send the result and free it */
void command_forget(unsigned index);

/* Our end of a pipe goes into the stream; the caller closes the other end. 0 or -errno. */
int command_pipe(struct stream *stream, int number, int *theirs);

/* Whether there is room for more output: within the credit, and the outbox is not too full. */
bool output_can_read(const struct command *command, const struct stream *stream);
size_t output_read(struct command *command, int number); /* one read: its size, or 0 */
void output_finish(struct command *command, int number); /* read the rest, and send what is kept */

/* --- Calls of services (service_calls.c) --------------------------------------------------------- */

int command_service(uint32_t id, char *payload, size_t size, int input, int socket); /* socket: its descriptor 3 */
int command_call(uint32_t id, char *payload, size_t size, struct call *call); /* a call that waits for a fork */
struct command *command_oldest_call(uint32_t service); /* of this service */
void command_fail(struct command *command, int error); /* a call that cannot be served */
bool command_exists(uint32_t id, pid_t pid); /* whether a command has this id, or this pid */
pid_t command_pid(uint32_t id);
int command_null_fd(void);
void call_free(struct call *call);
bool call_retry(struct command *command); /* its fork ended before it began: give it to another one */
void call_reaped(pid_t pid);              /* a child has ended */
void call_service_ended(uint32_t id);     /* if this command was a service */
