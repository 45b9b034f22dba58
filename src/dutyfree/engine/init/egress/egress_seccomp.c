/* The seccomp filter of the egress process. */
#include "egress/egress.h"

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __SANITIZE_ADDRESS__
static const uint16_t calls[] = {
	SYS_splice, SYS_read, SYS_recvfrom, SYS_sendto, SYS_recvmsg, SYS_sendmsg, SYS_connect, SYS_accept4, SYS_close, SYS_shutdown,
	SYS_setsockopt, SYS_getsockopt, SYS_getsockname, SYS_getpeername, SYS_epoll_pwait, SYS_epoll_ctl,
	SYS_clock_gettime, SYS_getrandom, SYS_mmap, SYS_munmap, SYS_mremap, SYS_mprotect, SYS_madvise, SYS_brk,
	SYS_exit_group, SYS_prlimit64, SYS_futex, SYS_rt_sigreturn, SYS_restart_syscall,
#ifdef __x86_64__
	SYS_epoll_wait, SYS_getrlimit,
#endif
};
#define CALLS (sizeof calls / sizeof *calls)

/* IP sockets and memory only. It can neither open files nor start processes. */
void egress_seccomp_enter(void)
{
	struct sock_filter code[CALLS + 12];
#ifdef __x86_64__
	const uint32_t architecture = AUDIT_ARCH_X86_64;
#else
	const uint32_t architecture = AUDIT_ARCH_AARCH64;
#endif
	unsigned length = 0;

	code[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
	code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, architecture, 1, 0);
	code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	code[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
	for (unsigned i = 0; i < CALLS; i++)
		code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], (uint8_t)(CALLS - i + 5), 0);
	code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 1, 0);
	code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	code[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0]));
	code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 2, 0);
	code[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 1, 0);
	code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
	code[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	struct sock_fprog program = {(unsigned short)length, code};
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
		_exit(71);
}
#else
void egress_seccomp_enter(void)
{
	/* The sanitizer needs more system calls. */
}
#endif
