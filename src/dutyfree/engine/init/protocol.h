/* What is said on the two channels, and nothing else: one header, one version.
 *
 * owner ── SOCK_SEQPACKET ── launcher     one request, one reply (replies may come in another order)
 * owner ── SOCK_STREAM ───── init         frames, both ways, many commands at once
 *
 * All integers have the machine's byte order: both ends are on one machine. Strings are NUL-terminated.
 * Whoever parses checks every length against what is there; a frame that does not fit its type is
 * answered with EPROTO, and changes nothing.
 */
#ifndef DUTYFREE_PROTOCOL_H
#define DUTYFREE_PROTOCOL_H

#include <errno.h>
#include <stdint.h>

#define PROTOCOL_VERSION 1

/* --- The launcher ----------------------------------------------------------------------------------- */

#define REQUEST_MAX 16384
#define TREES_MAX 8
#define LAYERS_MAX 32
#define MOUNTPOINT_MAX 64
#define LABEL_MAX 128

enum request_kind {
	REQUEST_HELLO = 1,   /* → reply.value = PROTOCOL_VERSION, text = what this host has */
	REQUEST_LAYER = 2,   /* text = a host directory → reply.value = number of the layer */
	REQUEST_SCRATCH = 3, /* → reply.value = number of an empty layer, fd = its directory, to be filled */
	REQUEST_REMOVE_LAYER = 4,  /* number = a layer that no new sandbox shall use */
	REQUEST_CREATE = 5,  /* struct create, label → reply.value = number of the sandbox, fds = socket, pidfd */
	REQUEST_DESTROY = 6, /* number = a sandbox; answered when nothing of it is left */
	REQUEST_SLOTS = 8,    /* number = how many slots shall lie ready */
	REQUEST_FREEZE = 30, /* number = a sandbox; answered when every process of it stands still */
	REQUEST_THAW = 31,   /* number = a sandbox */
	REQUEST_NETWORK = 20, /* number = a sandbox; struct network, rules: what it may reach; no body: nothing */
	REQUEST_CONNECT = 21, /* number = a sandbox; struct port → fd = a socket, connecting to a server in there */
	REQUEST_PROBE = 50,  /* → text = what of the kernel works here, each with an errno */
	REQUEST_SNAPSHOT_MOVE = 70,   /* number = a sandbox that shall write no more → struct kept, a layer for each tree;
	                      * EBUSY if a copy is cheaper, or it shares memory; with a body, in any case */
	REQUEST_SNAPSHOT_COPY = 71,   /* number = a sandbox, frozen if it may write → likewise, of a copy */
	REQUEST_MERGE = 72,  /* struct merge; fd = a directory to fill, or none → struct kept, one layer or none */
	REQUEST_AUDIT = 92,   /* number = a sandbox → struct seen, then in words what is not as in the beginning */
};

struct request {
	uint32_t kind;
	uint32_t serial; /* comes back in the reply */
	uint32_t number;
	uint32_t size;   /* of what follows */
};

struct reply {
	uint32_t serial;
	int32_t error;   /* an errno, 0 for success; the text names the step that failed */
	uint32_t value;
	uint32_t size;   /* of the text that follows */
};

enum create_flags {
	CREATE_SHARED_NETWORK = 1, /* that of the launcher; without root only, where no other leads out */
};

/* One directory of the sandbox: layers, uppermost first, under a writable one. The first is "/". */
struct tree {
	char mountpoint[MOUNTPOINT_MAX]; /* relative to the sandbox's root, "" for it */
	uint32_t count;
	uint32_t layers[LAYERS_MAX];
};

/* Its label follows: less than LABEL_MAX, shown to whoever looks at the host's processes, and in there. */
struct create {
	uint32_t flags;
	uint32_t trees;
	uint64_t memory;    /* bytes, 0 for no limit */
	uint64_t disk;      /* bytes, 0 for no limit */
	uint64_t pids;      /* 0 for no limit */
	uint64_t cpu_quota; /* microseconds of each 100 ms, 0 for no limit */
	struct tree tree[TREES_MAX];
};

/* Layers of one tree, uppermost first: `own` of them become one; the others are where these refer to. */
struct merge {
	uint32_t count;
	uint32_t own;
	uint32_t layers[LAYERS_MAX];
};

/* What was kept; the numbers of its layers follow. */
struct snapshot_usage {
	uint64_t size;  /* bytes that it takes */
	uint64_t files;
};

/* What can be seen of a sandbox from outside, whatever those in it say. */
struct audit_result {
	uint64_t memory; /* bytes of its processes and files, without what is cached of others; 0 where nobody counts */
};

/* --- What a sandbox may reach ----------------------------------------------------------------------- */

#define RESOLVERS_MAX 3
#define RULES_MAX 256
#define DOMAIN_MAX 253 /* of a domain, as text */

enum network_flags { NETWORK_ALL = 1 /* every address and name but the host's own surroundings */ };

enum rule_kind {
	RULE_ADDRESS = 1, /* addresses that begin as this one does, by `prefix` bits */
	RULE_NAME = 2,    /* what this name led to, by the sandbox's own lookups */
	RULE_SUBDOMAINS = 3,   /* the same for every name below this one; below "" are all */
	RULE_HOST = 4,    /* the host's loopback, by the address that stands for it */
};

/* Addresses are IPv6 here, those of IPv4 mapped; numbers in them in network order, ports in the host's. */
struct rule {
	uint8_t address[16];
	uint16_t port; /* 0 for all */
	uint8_t kind;
	uint8_t prefix;
	uint32_t name_size; /* of the name that follows: lower case, without a final dot or NUL */
};

struct resolver {
	uint8_t address[16];
	uint16_t port;
	uint16_t unused;
};

struct network {
	uint32_t flags;
	uint32_t rules;
	uint32_t resolvers;
	struct resolver resolver[RESOLVERS_MAX];
};

struct port {
	uint16_t port;
	uint16_t ipv6; /* on ::1, not on 127.0.0.1 */
};

/* --- Init ------------------------------------------------------------------------------------------- */

#define FRAME_MAX (4u << 20) /* payload of one frame: above any argument list the kernel takes */
#define INLINE_MAX (256u << 10) /* files up to this size travel in a frame, larger ones as descriptors */
#define LISTING_MAX (32u << 20) /* the list of a directory, or what a search found, is no longer */
#define FRAME_COST 128u /* of output: what a frame costs its reader beyond its bytes, which may come one by one */

enum frame_kind {
	/* owner → init */
	FRAME_EXEC = 1,    /* struct exec, then strings: user, cwd, argv…, environment…; fd: stdin */
	FRAME_KILL = 2,    /* the command's whole tree; flags: FRAME_SPARE for all but its first process */
	FRAME_CREDIT = 3,  /* u32: so many more bytes of output may be sent, with FRAME_COST for each frame */
	FRAME_READ = 4,    /* path */
	FRAME_WRITE = 5,   /* struct write, path, data; or fd: a file to copy */
	FRAME_LIST = 6,    /* path */
	FRAME_REMOVE = 7,  /* path */
	FRAME_UNPACK = 8,  /* path; fd: an archive to read (tree_stream.c) */
	FRAME_PACK = 9,    /* path; fd: where to write the archive */
	FRAME_SIGNAL_ALL = 10, /* u32: a signal to every process but init */
	FRAME_PING = 11,   /* → u32: whether the memory limit killed a process since that was last said */
	FRAME_TERMINAL = 12, /* struct window, then as FRAME_EXEC: in a terminal of its own → FRAME_STARTED */
	FRAME_EDIT = 13,     /* struct edit, path, the old text and the new */
	FRAME_SEARCH = 14,   /* struct search, then strings: directory, pattern, names…, skipped… */
	FRAME_WATCH = 15,    /* struct watching, path */
	FRAME_SIGNAL_COMMAND = 16,   /* u32: a signal to the command's first process and its group */
	FRAME_POSTPONE = 17, /* u64: nanoseconds by which every deadline is later than was said */
	FRAME_VERIFY = 90,   /* u32: whether its network is closed → EBUSY and in words what is not as in the beginning */
	FRAME_BACKGROUND = 91, /* u32: whether commands give way to all other work from now on; no answer */
	FRAME_SERVICE = 100, /* as FRAME_EXEC: one that forks for others, with a socket to init as descriptor 3 */
	FRAME_CALL = 101,    /* struct calling, then as FRAME_EXEC: in a fork of a service; ESRCH if that has ended */
	FRAME_AWAIT = 102,   /* struct awaited, path → done when it is there */
	/* init → owner */
	FRAME_READY = 32,  /* struct ready: its files stand; what comes now is read when it is sealed, too */
	FRAME_FATAL = 33,  /* i32 errno, text: it cannot be made, and init exits; even after FRAME_READY */
	FRAME_OUTPUT = 34, /* flags: the stream, 1 or 2 */
	FRAME_EXIT = 35,   /* struct exit: the command's end, after all of its output */
	FRAME_DONE = 36,   /* i32 errno, then the answer */
	FRAME_STARTED = 37, /* fd: the owner's side of the command's terminal */
};

/* The error of an operation on a pipe, a socket or a device, which are no files. */
#define ERROR_SPECIAL ENOTBLK

/* The error of an operation that a process of its own does, if something in the sandbox killed that one. */
#define ERROR_KILLED EOWNERDEAD

enum frame_flags {
	FRAME_SPARE = 1,
	FRAME_WITH_FD = 0x100,
	FRAME_AFTER = 0x400, /* not before what the frame before this one asks for has ended */
	FRAME_IF_OK = 0x800, /* nor at all, but answered with ECANCELED, if that failed */
};

struct frame {
	uint32_t size; /* of the payload */
	uint16_t kind;
	uint16_t flags;
	uint32_t id;   /* chosen by the owner; 0 is init itself */
};

enum exec_flags {
	EXEC_STREAM = 1, /* send output as it comes, within the credit */
};

struct exec {
	uint64_t timeout; /* nanoseconds, 0 for none */
	uint32_t head;    /* bytes kept of each stream from its beginning */
	uint32_t tail;    /* and from its end */
	uint32_t flags;
	uint32_t argc;
	uint32_t envc;
};

/* What init and a service say to each other, on a socket that keeps messages apart:
 * init → service: u64, of no use to it; fd: the fork's socket. The service forks, so that the fork becomes init's
 * child. The fork leads a session, and sends one byte on its socket, which init takes for its word alone if the
 * kernel says so: then init marks it. The fork waits.
 * init → fork: one byte; fds: stdin, stdout, stderr, and a file with struct exec and its strings.
 * fork → init: one byte before it begins. If it ends without, another one gets the same. */
struct call_request {
	uint32_t service; /* the number that its FRAME_SERVICE had */
};

enum await_kind { AWAIT_FILE = 1, AWAIT_SOCKET = 2 /* one of Unix that is listened to */ };

struct await_request {
	uint32_t kind;
};

struct write {
	uint32_t mode;
};

struct window {
	uint16_t rows, columns;
};

#define EDIT_MAX (16u << 20) /* no larger file is edited */
#define EDIT_LINES 16
/* The error of an edit whose old text stands in the file not once: u32 count, then the first lines of it. */
#define ERROR_NOT_ONCE EDOM

struct edit {
	uint32_t old_size;
	uint32_t new_size;
};

enum search_flags {
	SEARCH_REGEX = 1,  /* the pattern is an extended regular expression of POSIX, else a text */
	SEARCH_NOCASE = 2,
	SEARCH_BINARY = 4, /* look also into files with NUL bytes */
};

/* Without a pattern, files are found by their names alone. The answer: FRAME_OUTPUT with matches, each with
 * its path and its line, LISTED_MAX in all; the last has neither, and counts as `line` the files that were not
 * looked into. */
struct search {
	uint64_t timeout; /* nanoseconds, 0 for none */
	uint32_t flags;
	uint32_t matches; /* at most so many */
	uint32_t width;   /* at most so many bytes of a line */
	uint32_t names;   /* how many patterns of names; a file that fits none of them is passed over */
	uint32_t skipped; /* how many names of directories that are not entered */
	uint32_t unused;
};

enum match_flags {
	MATCH_CUT = 1,       /* the line is longer */
	MATCH_TRUNCATED = 2, /* of the last: there were more matches */
	MATCH_LAST = 4,
};

struct match {
	uint32_t line;
	uint32_t path_size;
	uint32_t text_size;
	uint32_t flags;
};

/* The error of a pattern that is none: the reason follows. */
#define ERROR_PATTERN EILSEQ

enum watch_flags { WATCH_RECURSIVE = 1 };

struct watch_request {
	uint32_t flags;
	uint32_t directories; /* at most so many are watched */
};

/* The answer to FRAME_WATCH: FRAME_OUTPUT with these, each with its path, until it is killed. The first has
 * no kind and says that from now on all is seen. */
struct change {
	uint32_t kind; /* as inotify has it */
	uint32_t path_size;
};

struct ready {
	uint32_t version;
	uint64_t activated; /* CLOCK_MONOTONIC nanoseconds, as all times here */
	uint64_t mounted;
};

enum exit_flags {
	EXIT_TIMED_OUT = 1,
	EXIT_KILLED = 2,       /* by FRAME_KILL */
	EXIT_NOT_STARTED = 4,  /* the program could not be run */
	EXIT_NO_DIRECTORY = 8, /* nor entered the directory */
	EXIT_NO_USER = 16,     /* nor become the user */
	EXIT_NO_PROCESS = 32,  /* nor made a process at all */
	EXIT_OOM = 64, /* the memory limit killed a process of the sandbox meanwhile, or since the last command's end */
};

struct exit {
	int32_t status;  /* as waitpid has it; an errno with EXIT_NOT_STARTED and below */
	uint32_t flags;
	uint64_t received, spawning, running, ended, sent;
	uint64_t cpu_us, peak_kb;
	uint64_t total[2], cut[2]; /* bytes of stdout, stderr: seen, dropped from the middle */
};

/* The answer to FRAME_LIST: entries of this, then the name. */
struct entry {
	uint64_t size;
	uint32_t mode; /* as stat has it */
	uint32_t name_size;
};

/* An archive is a sequence of these, each with its path (relative, "" for the root) and its data;
 * of a link, the data is the target. It ends with one of mode 0. */
struct member {
	uint64_t size;
	uint32_t mode;
	uint32_t path_size;
};

#endif
