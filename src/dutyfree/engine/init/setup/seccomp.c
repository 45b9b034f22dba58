/* The seccomp filter as a BPF program. System call numbers with the same verdict form ranges, and the ranges a balanced
 * tree of comparisons: about seven instructions per call. The program is four times smaller than a linear list, so the
 * kernel compiles it faster. */
#include "setup/seccomp.h"

#include "setup/syscalls.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#endif

#define NAMESPACES                                                                                       \
	(CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID |    \
	 CLONE_NEWNET)
#define TIOCSTI_ 0x5412u   /* inserts input into a terminal that other processes share */
#define TIOCLINUX_ 0x541cu /* pastes into a console */
/* Other address families may make the kernel load a module. */
#define AF_UNIX_ 1u
#define AF_INET_ 2u
#define AF_INET6_ 10u
#define AF_NETLINK_ 16u  /* only protocol 0, NETLINK_ROUTE */
#define SOCKET_KIND 0xfu /* mask for the socket type; the rest are flags */
#define SOCK_STREAM_ 1u
#define SOCK_DGRAM_ 2u
#define SOCK_RAW_ 3u
#define IPPROTO_TCP_ 6u
#define SOL_SOCKET_ 1u
#define SO_RCVBUF_ 8u
#define F_SETLEASE_ 1024u /* a lease makes everyone who opens the file wait, even init */
#define MAP_HUGETLB_ 0x40000u
#define MFD_HUGETLB_ 4u
#define MADV_PAGEOUT_ 21u
#define FADV_DONTNEED_ 4u
#define RENAME_WHITEOUT_ 4
#define RWF_NOWAIT_ 8u
#define SCHED_RESET_ON_FORK_ 0x40000000u
#define IOPRIO_LEVEL 0xe004u  /* the class, and whether the level is one of the lower four of eight */
#define IOPRIO_RAISED 0x4000u /* best effort class with a raised level */
#define TCP_ZEROCOPY_RECEIVE_ 35u
#define ATTRIBUTE_MAX 1024u

enum verdict {
	ALLOW,
	DENY,
	NO_SYSCALL,
	NOOP, /* returns 0 and does nothing */
	NOTIFY_BROKER,
	CHECK_CLONE3,
	CHECK_GETSOCKOPT,
	CHECK_IOPRIO,
	CHECK_PERSONALITY,
	CHECK_PRLIMIT,
	CHECK_SCHED_SETATTR,
	CHECK_SETSOCKOPT,
	CHECK_SOCKET,
	CHECK_SOCKETPAIR,
	CHECK_BY_RULE /* and the following: one verdict for each rule */
};

#define ERRNO(number) (SECCOMP_RET_ERRNO | (number))

/* Calls that one argument decides. All other uses of them are allowed. */
static const struct rule {
	uint16_t call;
	uint8_t argument;
	uint8_t test; /* of the lower 32 bits */
	uint32_t value, action;
} rules[] = {
	{SYS_clone, 0, BPF_JSET, NAMESPACES, ERRNO(EPERM)},
	{SYS_fcntl, 1, BPF_JEQ, F_SETLEASE_, ERRNO(EINVAL)},
	{SYS_ioctl, 1, BPF_JEQ, TIOCSTI_, ERRNO(EPERM)},
	{SYS_ioctl, 1, BPF_JEQ, TIOCLINUX_, ERRNO(EPERM)},
	/* Core dumps are off. Programs that switch them off too must not fail. */
	{SYS_setrlimit, 0, BPF_JEQ, RLIMIT_CORE, ERRNO(0)},
	/* RLIMIT_RTTIME marks the processes of a command (process.c). It has no other effect here. */
	{SYS_setrlimit, 0, BPF_JEQ, RLIMIT_RTTIME, ERRNO(0)},
	/* Huge pages that the host's root reserved. ENOMEM is what hosts without them return. */
	{SYS_mmap, 3, BPF_JSET, MAP_HUGETLB_, ERRNO(ENOMEM)},
	{SYS_memfd_create, 1, BPF_JSET, MFD_HUGETLB_, ERRNO(ENOMEM)},
	/* Would evict files of shared images, even the host's, from the page cache. */
	{SYS_fadvise64, 3, BPF_JEQ, FADV_DONTNEED_, ERRNO(0)},
	{SYS_madvise, 2, BPF_JEQ, MADV_PAGEOUT_, ERRNO(EINVAL)},
	/* No control group counts the memory of POSIX ACLs, and a filter cannot see the attribute's name. */
	{SYS_setxattr, 3, BPF_JGT, ATTRIBUTE_MAX, ERRNO(E2BIG)},
	{SYS_lsetxattr, 3, BPF_JGT, ATTRIBUTE_MAX, ERRNO(E2BIG)},
	{SYS_fsetxattr, 3, BPF_JGT, ATTRIBUTE_MAX, ERRNO(E2BIG)},
	/* Would reveal which parts of a file are in the page cache. The kernel returns this error where it is
	 * unsupported. */
	{SYS_preadv2, 5, BPF_JSET, RWF_NOWAIT_, ERRNO(EOPNOTSUPP)},
	/* Would give children the default time slice again (priority.c). */
	{SYS_sched_setscheduler, 1, BPF_JSET, SCHED_RESET_ON_FORK_, ERRNO(EPERM)},
	/* Any user may create a whiteout, which is a character device, in a directory that is no overlay (place.c). In
	 * a layer it would hide files. An overlay refuses both with the same errors. */
#ifdef SYS_mknod
	{SYS_mknod, 1, BPF_JSET, S_IFCHR, ERRNO(EPERM)}, /* and S_IFBLK, which has the same bit */
#endif
	{SYS_mknodat, 2, BPF_JSET, S_IFCHR, ERRNO(EPERM)},
	{SYS_renameat2, 4, BPF_JSET, RENAME_WHITEOUT_, ERRNO(EINVAL)},
	{SYS_seccomp, 0, BPF_JEQ, SECCOMP_SET_MODE_FILTER, SECCOMP_RET_USER_NOTIF},
	{SYS_prctl, 0, BPF_JEQ, PR_SET_SECCOMP, SECCOMP_RET_USER_NOTIF},
};
#define RULES (sizeof rules / sizeof *rules)

#define BIT(n) (1u << (n) % 32)

/* Socket options that may be set, by level: one bit each, 32 per word. All others fail with ENOPROTOOPT. Many of them
 * make the kernel allocate memory that no control group counts (extension headers, multicast groups, keys, filters,
 * timestamps), or change something for the whole host. The numbers are the same on all our architectures. */
static const struct options {
	uint16_t level;
	uint8_t word;
	uint32_t allowed;
} options[] = {
	/* SOL_SOCKET: DEBUG to REUSEPORT but RCVBUF (see CHECK_SETSOCKOPT); PASSCRED, SNDLOWAT, RCVTIMEO, SNDTIMEO;
	 * BINDTODEVICE, TIMESTAMP. Not RCVLOWAT, which grows the receive buffer. */
	{1, 0, 0x0000fefe | BIT(16) | BIT(19) | BIT(20) | BIT(21) | BIT(25) | BIT(29)},
	/* PASSSEC, TIMESTAMPNS, RXQ_OVFL, PEEK_OFF, SELECT_ERR_QUEUE, BINDTOIFINDEX, TIMESTAMP_NEW; */
	{1, 1, BIT(34) | BIT(35) | BIT(40) | BIT(42) | BIT(45) | BIT(62) | BIT(63)},
	/* TIMESTAMPNS_NEW, RCVTIMEO_NEW, SNDTIMEO_NEW, PASSPIDFD, PASSRIGHTS. */
	{1, 2, BIT(64) | BIT(66) | BIT(67) | BIT(76) | BIT(83)},
	/* TCP: NODELAY to CONGESTION, THIN_*, USER_TIMEOUT, FASTOPEN, NOTSENT_LOWAT, FASTOPEN_CONNECT; INQ. */
	{6, 0, 0x00003ffe | BIT(16) | BIT(17) | BIT(18) | BIT(23) | BIT(25) | BIT(30)},
	{6, 1, BIT(36)},
	/* IP: TOS, TTL, RECVOPTS, RETOPTS, PKTINFO, MTU_DISCOVER to RECVTOS, FREEBIND, ORIGDSTADDR, MINTTL,
	 * BIND_ADDRESS_NO_PORT; MULTICAST_IF to LOOP, MULTICAST_ALL, UNICAST_IF, LOCAL_PORT_RANGE. No multicast
	 * membership. */
	{0, 0, BIT(1) | BIT(2) | BIT(6) | BIT(7) | BIT(8) | 0x00003c00 | BIT(15) | BIT(20) | BIT(21) | BIT(24)},
	{0, 1, BIT(32) | BIT(33) | BIT(34) | BIT(49) | BIT(50) | BIT(51)},
	/* IPv6: the 2292 options, UNICAST_HOPS to MULTICAST_LOOP, MTU_DISCOVER to V6ONLY, MULTICAST_ALL; RECVPKTINFO to
	 * RECVHOPLIMIT, RECV* of extension headers, PATHMTU, DONTFRAG; RECVTCLASS, TCLASS, AUTOFLOWLABEL,
	 * ADDR_PREFERENCES, MINHOPCOUNT, ORIGDSTADDR, UNICAST_IF, FREEBIND. */
	{41, 0, 0x0000013c | 0x000f0000 | 0x07800000 | BIT(29)},
	{41, 1, BIT(49) | BIT(50) | BIT(51) | BIT(52) | BIT(53) | BIT(56) | BIT(58) | BIT(60) | BIT(62)},
	{41, 2, BIT(66) | BIT(67) | BIT(70) | BIT(72) | BIT(73) | BIT(74) | BIT(76) | BIT(78)},
	/* UDP: CORK; SEGMENT, GRO. */
	{17, 0, BIT(1)},
	{17, 3, BIT(103) | BIT(104)},
	/* Netlink: membership, PKTINFO, errors, acknowledgements, strict checks. */
	{270, 0, BIT(1) | BIT(2) | BIT(3) | BIT(4) | BIT(5) | BIT(10) | BIT(11) | BIT(12)},
};
#define OPTIONS (sizeof options / sizeof *options)
#define WORDS 4
#define VERDICTS (CHECK_BY_RULE + RULES)

/* Calls from `first` up to the next range have the same verdict. */
struct range {
	uint32_t first;
	unsigned verdict;
};

static const uint16_t allowed[] = {
#define X(name) SYS_##name,
	SYSCALLS_EVERYWHERE(X)
#ifdef __x86_64__
	SYSCALLS_X86_64(X)
#endif
#undef X
#define X(name, number) number,
	SYSCALLS_NEW(X)
#undef X
};

uint64_t seccomp_token[2];
static struct sock_filter code[512];
static unsigned length;
static struct range ranges[256];
static unsigned count;
/* Jumps to a verdict. They are patched when the positions of the verdicts are known. */
static struct {
	unsigned at;
	int branch;
	unsigned verdict;
} patches[512];
static unsigned patched;

static unsigned emit(uint16_t operation, uint32_t value, uint8_t yes, uint8_t no)
{
	if (length == sizeof code / sizeof *code)
		abort();
	code[length] = (struct sock_filter){operation, yes, no, value};
	return length++;
}

/* Calls with their own verdict. */
static const struct {
	uint16_t call, verdict;
} special[] = {
	{SYS_personality, CHECK_PERSONALITY},
	{SYS_prlimit64, CHECK_PRLIMIT},
	{SYS_clone3, CHECK_CLONE3},
	{SYS_getsockopt, CHECK_GETSOCKOPT},
	{SYS_ioprio_set, CHECK_IOPRIO},
	{SYS_sched_setattr, CHECK_SCHED_SETATTR},
	{SYS_setsockopt, CHECK_SETSOCKOPT},
	{SYS_socket, CHECK_SOCKET},
	{SYS_socketpair, CHECK_SOCKETPAIR},
	{SYS_connect, NOTIFY_BROKER},
	{SYS_sync, NOOP}, /* would flush all disks of the host; a sandbox has no data on one */
	/* mincore and cachestat reveal which files of an image others have read. */
	{SYS_mincore, NO_SYSCALL}, {451, NO_SYSCALL},
	{SYS_io_setup, NO_SYSCALL}, /* the host has one limit for all AIO requests (fs.aio-max-nr) */
	/* io_uring_setup, _enter, _register: seccomp cannot see its requests. */
	{425, NO_SYSCALL}, {426, NO_SYSCALL}, {427, NO_SYSCALL},
	{440, NO_SYSCALL}, /* process_madvise: can do what madvise above may not */
	{447, NO_SYSCALL}, /* memfd_secret: each page splits the kernel's direct map for good */
	{463, NO_SYSCALL}, /* setxattrat: its size is in memory, where a filter cannot look */
};

static unsigned verdict_of(uint32_t number)
{
	for (unsigned i = 0; i < RULES; i++)
		if (rules[i].call == number)
			return CHECK_BY_RULE + i;
	for (unsigned i = 0; i < sizeof special / sizeof *special; i++)
		if (special[i].call == number)
			return special[i].verdict;
	for (unsigned i = 0; i < sizeof allowed / sizeof *allowed; i++)
		if (allowed[i] == number)
			return ALLOW;
	return number > SYSCALLS_KNOWN ? NO_SYSCALL : DENY;
}

static void emit_branch(unsigned at, int which, unsigned low, unsigned high);

/* Emit a binary search for the verdict of a number between ranges[low] and ranges[high]. */
static void emit_search(unsigned low, unsigned high)
{
	unsigned middle = (low + high + 1) / 2;
	unsigned at = emit(BPF_JMP | BPF_JGE | BPF_K, ranges[middle].first, 0, 0);

	emit_branch(at, 0, low, middle - 1); /* the branch not taken follows directly */
	emit_branch(at, 1, middle, high);
}

static void emit_branch(unsigned at, int which, unsigned low, unsigned high)
{
	if (low == high) {
		patches[patched].at = at;
		patches[patched].branch = which;
		patches[patched++].verdict = ranges[low].verdict;
		return;
	}
	unsigned distance = length - at - 1;
	if (distance > 255)
		abort();
	if (which)
		code[at].jt = (uint8_t)distance;
	else
		code[at].jf = (uint8_t)distance;
	emit_search(low, high);
}

static void emit_load(size_t offset)
{
	emit(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset, 0, 0);
}

static void emit_return(uint32_t action)
{
	emit(BPF_RET | BPF_K, action, 0, 0);
}

#define ARGUMENT(n) offsetof(struct seccomp_data, args[n])

/* Allow the call if this argument and the next hold the token; else go on. Nine instructions. */
static void emit_token_check(unsigned argument)
{
	for (unsigned i = 0; i < 4; i++) {
		uint32_t part = (uint32_t)(seccomp_token[i / 2] >> (i % 2 * 32));
		emit_load(ARGUMENT(argument + i / 2) + i % 2 * 4);
		emit(BPF_JMP | BPF_JEQ | BPF_K, part, 0, (uint8_t)(7 - 2 * i));
	}
	emit_return(SECCOMP_RET_ALLOW);
}

/* All rules of one call, from its first. */
static void emit_rules(const struct rule *rule)
{
	for (uint16_t call = rule->call; rule < rules + RULES && rule->call == call; rule++) {
		emit_load(ARGUMENT(rule->argument));
		emit(BPF_JMP | BPF_K | rule->test, rule->value, 0, 1);
		emit_return(rule->action);
	}
	emit_return(SECCOMP_RET_ALLOW);
}

/* Compute the word from level and option, then test the bit of the option. A huge level can overflow to another
 * one, but the kernel has no options at it. */
static void emit_setsockopt(void)
{
	emit_load(ARGUMENT(2));
	emit(BPF_JMP | BPF_JGE | BPF_K, 32 * WORDS, 13 + OPTIONS, 0); /* → refused */
	emit(BPF_ALU | BPF_RSH | BPF_K, 5, 0, 0);
	emit(BPF_MISC | BPF_TAX, 0, 0, 0);
	emit_load(ARGUMENT(1));
	emit(BPF_ALU | BPF_MUL | BPF_K, WORDS, 0, 0);
	emit(BPF_ALU | BPF_ADD | BPF_X, 0, 0, 0);
	emit(BPF_ST, 0, 0, 0);
	emit_load(ARGUMENT(2));
	emit(BPF_ALU | BPF_AND | BPF_K, 31, 0, 0);
	emit(BPF_MISC | BPF_TAX, 0, 0, 0);
	emit(BPF_LD | BPF_IMM, 1, 0, 0);
	emit(BPF_ALU | BPF_LSH | BPF_X, 0, 0, 0);
	emit(BPF_MISC | BPF_TAX, 0, 0, 0);
	emit(BPF_LD | BPF_MEM, 0, 0, 0);
	for (unsigned i = 0; i < OPTIONS; i++) /* → the pairs below */
		emit(BPF_JMP | BPF_JEQ | BPF_K, WORDS * options[i].level + options[i].word, (uint8_t)(OPTIONS + i), 0);
	emit_return(ERRNO(ENOPROTOOPT));
	for (unsigned i = 0; i < OPTIONS; i++) {
		emit(BPF_MISC | BPF_TXA, 0, 0, 0);
		emit(BPF_JMP | BPF_JSET | BPF_K, options[i].allowed, (uint8_t)(2 * (OPTIONS - i) - 1), (uint8_t)(2 * (OPTIONS - i) - 2));
	}
	emit_return(ERRNO(ENOPROTOOPT));
	emit_return(SECCOMP_RET_ALLOW);
}

static void emit_verdict(unsigned verdict)
{
	static const uint32_t personalities[] = {0, 8, 0x20000, 0x20008, 0xffffffff};

	switch (verdict) {
	case ALLOW:
		emit_return(SECCOMP_RET_ALLOW);
		break;
	case DENY:
		emit_return(ERRNO(EPERM));
		break;
	case NO_SYSCALL:
		emit_return(ERRNO(ENOSYS));
		break;
	case NOOP:
		emit_return(ERRNO(0));
		break;
	case NOTIFY_BROKER:
		emit_return(SECCOMP_RET_USER_NOTIF);
		break;
	case CHECK_CLONE3: /* its flags are in memory, where a filter cannot look; libraries fall back to clone */
		emit_token_check(2);
		emit_return(ERRNO(ENOSYS));
		break;
	case CHECK_PERSONALITY:
		emit_load(ARGUMENT(0));
		for (uint8_t i = 0; i < 5; i++)
			emit(BPF_JMP | BPF_JEQ | BPF_K, personalities[i], (uint8_t)(5 - i), 0);
		emit_return(ERRNO(EPERM));
		emit_return(SECCOMP_RET_ALLOW);
		break;
	case CHECK_PRLIMIT: /* reading is allowed; setting only for oneself, and neither RLIMIT_CORE nor the mark */
		emit_load(ARGUMENT(1));
		emit(BPF_JMP | BPF_JEQ | BPF_K, RLIMIT_RTTIME, 1, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, RLIMIT_CORE, 9, 14);
		emit_token_check(4);
		emit_load(ARGUMENT(2));
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 2);
		emit_load(ARGUMENT(2) + 4);
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0);
		emit_return(ERRNO(0));
		emit_load(ARGUMENT(0));
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 5, 0);
		emit_load(ARGUMENT(2));
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 0, 2);
		emit_load(ARGUMENT(2) + 4);
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 1, 0);
		emit_return(ERRNO(EPERM));
		emit_return(SECCOMP_RET_ALLOW);
		break;
	case CHECK_SCHED_SETATTR: /* its argument is in memory: a short slice would preempt all others */
		emit_token_check(3);
		emit_return(ERRNO(EPERM));
		break;
	case CHECK_IOPRIO:
		emit_load(ARGUMENT(2));
		emit(BPF_ALU | BPF_AND | BPF_K, IOPRIO_LEVEL, 0, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, IOPRIO_RAISED, 0, 1);
		emit_return(ERRNO(EPERM));
		emit_return(SECCOMP_RET_ALLOW);
		break;
	case CHECK_GETSOCKOPT: /* TCP_ZEROCOPY_RECEIVE pins kernel pages while they are mapped */
		emit_load(ARGUMENT(1));
		emit(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_TCP_, 0, 3);
		emit_load(ARGUMENT(2));
		emit(BPF_JMP | BPF_JEQ | BPF_K, TCP_ZEROCOPY_RECEIVE_, 0, 1);
		emit_return(ERRNO(ENOPROTOOPT));
		emit_return(SECCOMP_RET_ALLOW);
		break;
	case CHECK_SETSOCKOPT: /* no control group counts unread data: SO_RCVBUF is accepted and ignored */
		emit_load(ARGUMENT(1));
		emit(BPF_JMP | BPF_JEQ | BPF_K, SOL_SOCKET_, 0, 3);
		emit_load(ARGUMENT(2));
		emit(BPF_JMP | BPF_JEQ | BPF_K, SO_RCVBUF_, 0, 1);
		emit_return(ERRNO(0));
		emit_setsockopt();
		break;
	case CHECK_SOCKET: /* init creates those whose buffers no control group counts (seccomp_broker.c) */
		emit_load(ARGUMENT(0));
		emit(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX_, 23, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK_, 10, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, AF_INET_, 1, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6_, 0, 11);
		emit_load(ARGUMENT(1));
		emit(BPF_ALU | BPF_AND | BPF_K, SOCKET_KIND, 0, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, SOCK_DGRAM_, 9, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, SOCK_RAW_, 16, 0); /* the kernel refuses it */
		emit(BPF_JMP | BPF_JEQ | BPF_K, SOCK_STREAM_, 0, 5);
		emit_load(ARGUMENT(2)); /* another protocol than TCP may make the kernel load a module */
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 13, 0);
		emit(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_TCP_, 12, 2);
		emit_load(ARGUMENT(2));
		emit(BPF_JMP | BPF_JEQ | BPF_K, 0, 2, 1);
		emit_return(ERRNO(EPROTONOSUPPORT));
		emit_return(ERRNO(EAFNOSUPPORT));
		emit_token_check(3);
		emit_return(SECCOMP_RET_USER_NOTIF);
		break;
	case CHECK_SOCKETPAIR:
		emit_load(ARGUMENT(0));
		emit(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX_, 1, 0);
		emit_return(ERRNO(EAFNOSUPPORT));
		emit_return(SECCOMP_RET_ALLOW);
		break;
	default:
		emit_rules(&rules[verdict - CHECK_BY_RULE]);
	}
}

unsigned seccomp_prepare(void)
{
	unsigned offsets[VERDICTS];

	if (getrandom(seccomp_token, sizeof seccomp_token, 0) != sizeof seccomp_token)
		abort();
	for (uint32_t number = 0; number <= SYSCALLS_KNOWN + 1; number++) {
		unsigned verdict = verdict_of(number);
		if (count == 0 || ranges[count - 1].verdict != verdict)
			ranges[count++] = (struct range){number, verdict};
	}
	emit_load(offsetof(struct seccomp_data, arch));
	emit(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0); /* no 32-bit calls */
	emit_return(ERRNO(ENOSYS));
	emit_load(offsetof(struct seccomp_data, nr));
	emit_search(0, count - 1);
	/* Conditional jumps reach 255 instructions. Verdicts further away get an unconditional jump. */
	for (unsigned verdict = 0; verdict < VERDICTS; verdict++) {
		offsets[verdict] = length;
		emit(BPF_JMP | BPF_JA, 0, 0, 0);
	}
	for (unsigned verdict = 0; verdict < VERDICTS; verdict++) {
		code[offsets[verdict]].k = length - offsets[verdict] - 1;
		emit_verdict(verdict);
	}
	for (unsigned i = 0; i < patched; i++) {
		unsigned distance = offsets[patches[i].verdict] - patches[i].at - 1;
		if (distance > 255)
			abort();
		if (patches[i].branch)
			code[patches[i].at].jt = (uint8_t)distance;
		else
			code[patches[i].at].jf = (uint8_t)distance;
	}
	return length;
}

int seccomp_enter(void)
{
	const unsigned all = SECCOMP_FILTER_FLAG_TSYNC | SECCOMP_FILTER_FLAG_TSYNC_ESRCH;
	/* WAIT_KILLABLE_RECV: a signal does not restart a call that the broker is handling. Some would never finish. */
	const unsigned notify = SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV;
	struct sock_fprog program = {(unsigned short)length, code};
	long listener = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all | notify, &program);

	if (listener >= 0)
		return (int)listener;
	if (errno != EBUSY)
		return -errno;
	/* There is a listener already: we run inside another sandbox, and the kernel allows only one. Go without a
	 * broker. */
	for (unsigned i = 0; i < length; i++)
		if (code[i].code == (BPF_RET | BPF_K) && code[i].k == SECCOMP_RET_USER_NOTIF)
			code[i].k = SECCOMP_RET_ALLOW;
	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, all, &program) < 0 ? -errno : -EBUSY;
}
