/* A command under way, as starting.c (its beginning), command.c (its life) and output.c (what it says) know it. */
#ifndef DUTYFREE_COMMAND_H
#define DUTYFREE_COMMAND_H

#include "init.h"

struct stream {
	int fd;       /* -1 when it has ended */
	bool muted;   /* not watched: nobody takes what it says */
	uint64_t total, passed;
	char *buffer; /* what is to be sent with the next frame */
	size_t used;
	char *tail;   /* the last bytes, in a ring: written to at tail_total % size */
	uint64_t tail_total;
};

struct command {
	uint32_t id;
	pid_t pid;
	bool worker;
	struct exec wanted;
	uint64_t mark, deadline, credit;
	struct exit result;
	struct stream streams[2];
};

/* In a table, by its index there; NULL if that is full, or has one of this id. */
struct command *command_new(uint32_t id, unsigned *index);
void command_listen(unsigned index, int number, bool on, int operation); /* to one of its streams */
void command_finish(unsigned index); /* tells the owner, and forgets it */

/* A pipe: our end for the stream, and theirs, which is the caller's to close. 0 or -errno. */
int starting_pipe(struct stream *stream, int number, int *theirs);

/* Whether more output can be taken: bounded memory here, and the owner's pace. */
bool output_wanted(const struct command *command, const struct stream *stream);
size_t output_read(struct command *command, int number); /* once: the count, 0 if there is nothing */
void output_finish(struct command *command, int number); /* reads what is left, and sends all that is kept */

#endif
