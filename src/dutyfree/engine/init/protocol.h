/* The two protocols of the engine. engine/launcher/protocol.py mirrors this file; change both together.
 *
 * owner ── SOCK_SEQPACKET ── launcher     one reply for each request, not always in order
 * owner ── SOCK_STREAM ───── init         frames in both directions, many commands at once
 * owner ── a byte stream ─── init         the same without descriptors: init as a guest (setup/guest.c)
 *
 * Integers have the machine's byte order, because both ends run on one machine. Strings are NUL-terminated. The
 * receiver checks every length. A frame that does not fit its kind is answered with EPROTO and has no effect. */
#pragma once

#include <errno.h>
#include <stdint.h>

#define PROTOCOL_VERSION 3

/* --- Owner and launcher -------------------------------------------------------------------------- */

#define REQUEST_MAX 16384
#define TREES_MAX 8
#define LAYERS_MAX 32
#define MOUNTPOINT_MAX 64
#define LABEL_MAX 128
#define PLACES_MAX 8

/* [1] One layer for each tree. EBUSY if a copy is cheaper or /dev/shm has files; a non-empty body forces it. */
enum request_kind {
	REQUEST_HELLO = 1,          /* → reply.value = PROTOCOL_VERSION, text = cgroups, mode and ids of this host */
	REQUEST_LAYER = 2,          /* text = directory on the host; fd = its lock, to be held → reply.value = layer number */
	REQUEST_SCRATCH = 3,        /* → reply.value = number of a new empty layer, fd = its directory, to be filled */
	REQUEST_REMOVE_LAYER = 4,   /* number = layer. New sandboxes cannot use it any more */
	REQUEST_CREATE = 5,         /* struct create, label → reply.value = sandbox number, fds = socket, pidfd */
	REQUEST_DESTROY = 6,        /* number = sandbox. The reply comes when all of it is removed */
	REQUEST_SLOTS = 8,          /* number = how many slots to keep prepared */
	REQUEST_DISK = 9,           /* fd = directory on the host for images of file systems. Once, not rootless */
	REQUEST_TEMPLATE = 10,      /* u64 disk limit; fd = image of an empty ext4 of that size, to be copied */
	REQUEST_KEEP = 11,          /* fd = listening SOCK_SEQPACKET socket, before the first sandbox (keep.c). No fd: stop */
	REQUEST_LEASE = 12,         /* number = sandbox; u64: CLOCK_MONOTONIC nanoseconds until which it outlives the owner */
	REQUEST_ADOPT = 13,         /* number = sandbox of a former owner → u64 lease; fds = new socket, pidfd */
	REQUEST_SWEEP = 14,         /* u32… layers to keep, all with number = 1: end the sandboxes that were not adopted, remove other layers */
	REQUEST_FREEZE = 30,        /* number = sandbox. The reply comes when all its processes are frozen */
	REQUEST_THAW = 31,          /* number = sandbox */
	REQUEST_NETWORK = 20,       /* number = sandbox; struct network, rules. No body: close its network */
	REQUEST_CONNECT = 21,       /* number = sandbox; struct port → fd = socket that connects to a server inside */
	REQUEST_PROBE = 50,         /* → text = name=errno for each kernel feature that was tried */
	REQUEST_SNAPSHOT_MOVE = 70, /* number = sandbox that writes no more → struct snapshot_usage, layers [1] */
	REQUEST_SNAPSHOT_COPY = 71, /* number = sandbox, frozen if it may write → the same, from a copy */
	REQUEST_MERGE = 72,         /* struct merge; fd = directory to fill, else a new layer → struct snapshot_usage */
	REQUEST_AUDIT = 92,         /* number = sandbox → struct audit_result, then a text: what has changed */
};

struct request {
	uint32_t kind;
	uint32_t serial; /* copied into the reply */
	uint32_t number;
	uint32_t size; /* bytes of the body that follows */
};

struct reply {
	uint32_t serial;
	int32_t error; /* errno, 0 for success. On an error the text says what failed */
	uint32_t value;
	uint32_t size; /* bytes of the text that follows */
};

/* Parts of the isolation that a launcher leaves out of all its sandboxes, as its second argument says. Root only. */
enum wall {
	WALL_USER_NAMESPACE = 1,
	WALL_NAMESPACES = 2, /* network, ipc, uts and cgroup */
	WALL_SECCOMP = 4,
	WALL_MEMORY_CGROUP = 8,
	WALL_CGROUPS = 16, /* all controllers: no limits at all */
	WALL_CPU_PRIORITY = 32,
	WALLS_ALL = 63,
};

enum create_flags {
	CREATE_SHARED_NETWORK = 1, /* the sandbox uses the network of the launcher. Rootless, or without namespaces */
	CREATE_DISK = 2,           /* written files go to a disk image: a copy of the template for this disk limit */
};

/* One mount of the sandbox: read-only layers, uppermost first, under a writable directory. Tree 0 is "/". */
struct tree {
	char mountpoint[MOUNTPOINT_MAX]; /* relative to the root, "" for the root itself */
	uint32_t count;
	uint32_t layers[LAYERS_MAX];
};

/* A directory that needs no overlay. If it cannot be one, it stays a part of the overlay; struct ready says which are. */
enum place_kind {
	PLACE_PLAIN = 1, /* a directory of the writable file system itself: no layer has files there. One component */
	PLACE_FIXED = 2, /* a read-only bind mount of the lowest layer's directory: no other layer has it */
};

struct place {
	char path[MOUNTPOINT_MAX]; /* relative to the root */
	uint32_t kind;
};

/* A label of less than LABEL_MAX bytes follows. It shows in the process title, on the host and in the sandbox. */
struct create {
	uint32_t flags;
	uint32_t trees;
	uint64_t memory;    /* bytes, 0 for no limit */
	uint64_t disk;      /* bytes, 0 for no limit */
	uint64_t shm;       /* bytes of /dev/shm; without CREATE_DISK it shares the limit of disk */
	uint64_t pids;      /* 0 for no limit */
	uint64_t cpu_quota; /* microseconds per 100 ms, 0 for no limit */
	struct tree tree[TREES_MAX];
	uint32_t places;
	uint32_t unused;
	struct place place[PLACES_MAX];
};

/* Layers of one tree, uppermost first. The first `own` are merged into one; the others are the layers below, which the
 * merged ones may refer to (overlayfs redirect and metacopy). */
struct merge {
	uint32_t count;
	uint32_t own;
	uint64_t disk; /* the template for a new layer on disk; 0 for one in memory */
	uint32_t layers[LAYERS_MAX];
};

/* The numbers of the new layers follow. */
struct snapshot_usage {
	uint64_t size; /* bytes in use */
	uint64_t files;
};

/* What the launcher measures from outside, so that no process in the sandbox can fake it. */
struct audit_result {
	uint64_t memory; /* bytes: anonymous memory and tmpfs, without page cache; 0 without a memory cgroup */
};

/* --- Network policy ------------------------------------------------------------------------------ */

#define RESOLVERS_MAX 3
#define RULES_MAX 256
#define DOMAIN_MAX 253 /* characters of a domain name */

enum network_flags { NETWORK_ALL = 1 /* all addresses and names but those in denylist.h */ };

enum rule_kind {
	RULE_ADDRESS = 1,    /* addresses that share the first `prefix` bits with this one */
	RULE_NAME = 2,       /* addresses that the sandbox's own lookups of this name returned */
	RULE_SUBDOMAINS = 3, /* the same for all subdomains of this name; "" for all names */
	RULE_HOST = 4,       /* the host's loopback, through ADDRESS_HOST */
};

/* Addresses are IPv6, with IPv4 mapped (::ffff:…). Addresses are in network byte order, ports in host byte order. */
struct rule {
	uint8_t address[16];
	uint16_t port; /* 0 for all ports */
	uint8_t kind;
	uint8_t prefix;
	uint32_t name_size; /* bytes of the name that follows: lower case, no final dot, no NUL */
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
	uint16_t ipv6; /* connect to ::1 instead of 127.0.0.1 */
};

/* --- Owner and init ------------------------------------------------------------------------------ */

#define FRAME_MAX (4u << 20)    /* payload of one frame; larger than any argument list that the kernel accepts */
#define INLINE_MAX (256u << 10) /* smaller files travel in a frame, larger ones as a descriptor */
#define LISTING_MAX (32u << 20) /* the most that a directory listing or a search returns */
#define READ_MAX (1u << 30)     /* larger files are not read in-band */
#define INPUT_WINDOW (256u << 10) /* bytes of FRAME_INPUT that may be sent and not yet be taken */
#define FRAME_COST 128u         /* credit that an output frame costs besides its bytes, so that tiny frames cost too */

enum frame_kind {
	/* owner → init */
	FRAME_EXEC = 1,            /* struct exec, then strings: user, cwd, argv…, environment…; fd: stdin */
	FRAME_KILL = 2,            /* all processes of the command; with FRAME_SPARE all but its first process */
	FRAME_CREDIT = 3,          /* u32: this many more bytes of output may be sent; a frame costs FRAME_COST extra */
	FRAME_READ = 4,            /* path */
	FRAME_WRITE = 5,           /* struct write, path, data; or an fd to copy from */
	FRAME_LIST = 6,            /* path */
	FRAME_REMOVE = 7,          /* path */
	FRAME_UNPACK = 8,          /* path; fd: a tree stream to read (tree_stream.c) */
	FRAME_PACK = 9,            /* path; fd: where to write the tree stream, else it comes as FRAME_OUTPUT */
	FRAME_SIGNAL_ALL = 10,     /* u32: signal for all processes but init */
	FRAME_PING = 11,           /* → u32: whether the OOM killer killed a process since the last report */
	FRAME_TERMINAL = 12,       /* struct window, then as FRAME_EXEC: a command in a terminal → FRAME_STARTED */
	FRAME_EDIT = 13,           /* struct edit, path, old text, new text */
	FRAME_SEARCH = 14,         /* struct search, then strings: directory, pattern, names…, skipped… */
	FRAME_WATCH = 15,          /* struct watch_request, path */
	FRAME_SIGNAL_COMMAND = 16, /* u32: signal for the process group of the command */
	FRAME_POSTPONE = 17,       /* u64: nanoseconds to add to all deadlines */
	FRAME_INPUT = 18,          /* bytes of the input of a request with FRAME_WITH_INPUT; empty: its end */
	FRAME_VERIFY = 90,         /* u32: whether it has no network → EBUSY, text: what has changed */
	FRAME_BACKGROUND = 91,     /* u32: 1 for the lowest CPU weight from now on, 0 for the normal one; no answer */
	FRAME_SERVICE = 100,       /* as FRAME_EXEC: a service that forks for calls; descriptor 3 is a socket to init */
	FRAME_CALL = 101,          /* struct call_request, then as FRAME_EXEC: runs in a fork of a service, or ESRCH */
	FRAME_AWAIT = 102,         /* struct await_request, path → FRAME_DONE when it exists */
	/* init → owner */
	FRAME_READY = 32,   /* struct ready: the root is mounted. Frames are served once set-up is complete */
	FRAME_FATAL = 33,   /* i32 errno, text: set-up failed and init exits; possible even after FRAME_READY */
	FRAME_OUTPUT = 34,  /* flags: 1 for stdout, 2 for stderr */
	FRAME_EXIT = 35,    /* struct exit, after all output of the command */
	FRAME_DONE = 36,    /* i32 errno, then the result */
	FRAME_STARTED = 37, /* fd: the owner's side of the terminal */
	FRAME_TAKEN = 38,   /* u32: bytes of input that were taken, so that more may be sent; 0: nobody reads it */
	FRAME_ADOPTED = 39, /* u32…: ids of the commands that still run, for a new owner. The ends of others came before */
};

/* A file operation met a pipe, socket or device instead of a regular file. */
#define ERROR_SPECIAL ENOTBLK

/* Something in the sandbox killed the worker process of this operation. */
#define ERROR_KILLED EOWNERDEAD

enum frame_flags {
	FRAME_SPARE = 1,
	FRAME_WITH_FD = 0x100,
	FRAME_WITH_INPUT = 0x200, /* FRAME_INPUT brings what the descriptor would have: stdin, a file, a tree stream */
	FRAME_AFTER = 0x400, /* wait until the request of the frame before this one has ended */
	FRAME_IF_OK = 0x800, /* if that request failed, do nothing and answer ECANCELED */
};

struct frame {
	uint32_t size; /* bytes of the payload */
	uint16_t kind;
	uint16_t flags;
	uint32_t id; /* the owner chooses it; 0 is init itself */
};

enum exec_flags {
	EXEC_STREAM = 1, /* send output as it comes, within the credit */
};

struct exec {
	uint64_t timeout; /* nanoseconds, 0 for none */
	uint32_t head;    /* bytes to keep from the beginning of each stream */
	uint32_t tail;    /* bytes to keep from its end */
	uint32_t flags;
	uint32_t argc;
	uint32_t envc;
};

/* Messages between init and a service, on a SOCK_SEQPACKET socket:
 * init → service   u64, unused; fd: the socket of the new fork. The service forks twice, so that init becomes the
 *                  parent. The fork calls setsid() and sends one byte. Init checks the sender by SCM_CREDENTIALS and
 *                  marks it (process.c). The fork waits.
 * init → fork      one byte; fds: stdin, stdout, stderr, and a file with struct exec and its strings
 * fork → init      one byte before it begins. If it ends without, another fork gets the same call. */
struct call_request {
	uint32_t service; /* the id of its FRAME_SERVICE */
};

enum await_kind { AWAIT_FILE = 1, AWAIT_SOCKET = 2 /* a Unix socket that someone listens on */ };

struct await_request {
	uint32_t kind;
};

struct write {
	uint32_t mode;
};

struct window {
	uint16_t rows, columns;
};

#define EDIT_MAX (16u << 20) /* larger files are not edited */
#define EDIT_LINES 16
/* The old text does not occur exactly once. The answer: u32 count, then u32 line numbers, at most EDIT_LINES. */
#define ERROR_NOT_ONCE EDOM

struct edit {
	uint32_t old_size;
	uint32_t new_size;
};

enum search_flags {
	SEARCH_REGEX = 1, /* the pattern is a POSIX extended regular expression, not plain text */
	SEARCH_NOCASE = 2,
	SEARCH_BINARY = 4, /* also search files that contain NUL bytes */
};

/* Without a pattern, the search is for file names only. The answer: FRAME_OUTPUT with struct match, path and line for
 * each match, LISTING_MAX bytes in all. The last match has neither path nor text; its `line` counts the files that were
 * skipped. */
struct search {
	uint64_t timeout; /* nanoseconds, 0 for none */
	uint32_t flags;
	uint32_t matches; /* the most matches to return */
	uint32_t width;   /* the most bytes of a line to return */
	uint32_t names;   /* how many name patterns follow; only files that match one of them count */
	uint32_t skipped; /* how many directory names follow that are not entered */
	uint32_t unused;
};

enum match_flags {
	MATCH_CUT = 1,       /* the line is longer */
	MATCH_TRUNCATED = 2, /* in the last match: there were more matches */
	MATCH_LAST = 4,
};

struct match {
	uint32_t line;
	uint32_t path_size;
	uint32_t text_size;
	uint32_t flags;
};

/* The pattern is not a valid regular expression. The reason follows. */
#define ERROR_PATTERN EILSEQ

enum watch_flags { WATCH_RECURSIVE = 1 };

struct watch_request {
	uint32_t flags;
	uint32_t directories; /* the most directories to watch */
};

/* The answer to FRAME_WATCH: FRAME_OUTPUT with these, each with its path, until the watch is killed. The first one has
 * kind 0: from now on every change is reported. */
struct change {
	uint32_t kind; /* inotify event mask */
	uint32_t path_size;
};

struct ready {
	uint32_t version;
	uint32_t places;    /* bit i: place i of the request is no overlay */
	uint64_t activated; /* CLOCK_MONOTONIC nanoseconds, as all times here */
	uint64_t mounted;
};

enum exit_flags {
	EXIT_TIMED_OUT = 1,
	EXIT_KILLED = 2,       /* by FRAME_KILL */
	EXIT_NOT_STARTED = 4,  /* execve failed */
	EXIT_NO_DIRECTORY = 8, /* chdir failed */
	EXIT_NO_USER = 16,     /* the user was not found, or setuid failed */
	EXIT_NO_PROCESS = 32,  /* no process could be created */
	EXIT_OOM = 64,         /* an OOM kill in the sandbox during this command, or since the last one ended */
};

struct exit {
	int32_t status; /* as from waitpid; an errno with EXIT_NOT_STARTED and the flags below it */
	uint32_t flags;
	uint64_t received, spawning, running, ended, sent;
	uint64_t cpu_us, peak_kb;
	uint64_t total[2], cut[2]; /* bytes of stdout and stderr: in all, dropped from the middle */
};

/* The answer to FRAME_LIST: this and the name, for each entry. */
struct entry {
	uint64_t size;
	uint32_t mode; /* as st_mode */
	uint32_t name_size;
};

/* A tree stream: this, a path (relative, "" for the root) and data for each file. The data of a symbolic link is its
 * target. A member with mode 0 ends the stream. */
struct member {
	uint64_t size;
	uint32_t mode;
	uint32_t path_size;
};
