/* A command under way, as exec.c (its beginning), command.c (its life) and output.c (what it says) know it. */
#ifndef DUTYFREE_COMMAND_H
#define DUTYFREE_COMMAND_H

#include "pid1/init.h"

struct stream {
	int fd;       /* -1 when it has ended */
	bool unwatched;   /* not watched: nobody takes what it says */
	uint64_t total, passed;
	char *buffer; /* what is to be sent with the next frame */
	size_t used;
	char *tail;   /* the last bytes, in a ring: written to at tail_total % size */
	uint64_t tail_total;
};

/* What a fork of a service is to do: kept until the end, for one that ended before it began is no end of it. */
struct call {
	uint32_t service;
	int descriptors[4]; /* of its streams, and of what it is to do */
	int socket;         /* to the fork that has it, -1 while it waits for one */
	unsigned tries;
};

struct command {
	uint32_t id;
	pid_t pid; /* 0 of a call that waits for a fork */
	bool worker;
	struct call *call;
	struct exec wanted;
	uint64_t mark, deadline;
	int64_t credit; /* less than nothing after a read of more than was left */
	uint64_t oom; /* how many processes the memory limit had killed before, as far as the owner knows */
	struct exit result;
	struct stream streams[2];
};

/* In a table, by its index there; NULL if that is full, or has one of this id. */
struct command *command_new(uint32_t id, unsigned *index);
void command_watch_stream(unsigned index, int number, bool on, int operation); /* to one of its streams */
void command_finish(unsigned index); /* tells the owner, and forgets it */
void command_forget(unsigned index);

/* A pipe: our end for the stream, and theirs, which is the caller's to close. 0 or -errno. */
int command_pipe(struct stream *stream, int number, int *theirs);

/* Whether more output can be taken: bounded memory here, and the owner's pace. */
bool output_can_read(const struct command *command, const struct stream *stream);
size_t output_read(struct command *command, int number); /* once: the count, 0 if there is nothing */
void output_finish(struct command *command, int number); /* reads what is left, and sends all that is kept */

/* --- Calls of services (service_calls.c) ---------------------------------------------------------------------- */

int command_service(uint32_t id, char *payload, size_t size, int input, int socket); /* which is its descriptor 3 */
int command_call(uint32_t id, char *payload, size_t size, struct call *call); /* a call that waits from now on */
struct command *command_oldest_call(uint32_t service);        /* the oldest call that does */
void command_fail(struct command *command, int error);  /* a call that will not be served */
bool command_exists(uint32_t id, pid_t pid);                  /* whether there is one of this number, or process */
pid_t command_pid(uint32_t id);
int command_null_fd(void);
void call_free(struct call *call);
bool call_retry(struct command *command); /* its fork ended, and had not begun: another one is to do it */
void call_reaped(pid_t pid);           /* a child that is no command */
void call_service_ended(uint32_t id);  /* if it was one */

#endif
