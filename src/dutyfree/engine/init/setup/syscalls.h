/* The system calls that a sandbox may use: Docker's default list for a container without extra capabilities. Refused
 * are mounts, namespaces, modules, keyrings, io_uring, bpf, perf, userfaultfd, fanotify, file handles, clocks, swap,
 * quotas and NUMA placement. seccomp.c checks arguments of some calls, and removes a few. */
#pragma once

#define SYSCALLS_EVERYWHERE(X) \
	X(read) X(write) X(close) X(fstat) X(lseek) X(mmap) X(mprotect) X(munmap) X(brk) X(rt_sigaction) \
	X(rt_sigprocmask) X(rt_sigreturn) X(pread64) X(pwrite64) X(readv) X(writev) X(sched_yield) X(mremap) \
	X(msync) X(mincore) X(madvise) X(shmget) X(shmat) X(shmctl) X(dup) X(nanosleep) X(getitimer) \
	X(setitimer) X(getpid) X(sendfile) X(connect) X(accept) X(sendto) X(recvfrom) X(sendmsg) X(recvmsg) \
	X(shutdown) X(bind) X(listen) X(getsockname) X(getpeername) X(socketpair) X(setsockopt) X(getsockopt) \
	X(execve) X(exit) X(wait4) X(kill) X(uname) X(semget) X(semop) X(semctl) X(shmdt) X(msgget) X(msgsnd) \
	X(msgrcv) X(msgctl) X(fcntl) X(flock) X(fsync) X(fdatasync) X(truncate) X(ftruncate) X(getcwd) X(chdir) \
	X(fchdir) X(fchmod) X(fchown) X(umask) X(gettimeofday) X(getrlimit) X(getrusage) X(sysinfo) X(times) \
	X(ptrace) X(getuid) X(getgid) X(setuid) X(setgid) X(geteuid) X(getegid) X(setpgid) X(getppid) X(setsid) \
	X(setreuid) X(setregid) X(getgroups) X(setgroups) X(setresuid) X(getresuid) X(setresgid) X(getresgid) \
	X(getpgid) X(setfsuid) X(setfsgid) X(getsid) X(capget) X(capset) X(rt_sigpending) X(rt_sigtimedwait) \
	X(rt_sigqueueinfo) X(rt_sigsuspend) X(sigaltstack) X(statfs) X(fstatfs) X(getpriority) X(setpriority) \
	X(sched_setparam) X(sched_getparam) X(sched_setscheduler) X(sched_getscheduler) \
	X(sched_get_priority_max) X(sched_get_priority_min) X(sched_rr_get_interval) X(mlock) X(munlock) \
	X(mlockall) X(munlockall) X(prctl) X(adjtimex) X(setrlimit) X(sync) X(gettid) X(readahead) X(setxattr) \
	X(lsetxattr) X(fsetxattr) X(getxattr) X(lgetxattr) X(fgetxattr) X(listxattr) X(llistxattr) \
	X(flistxattr) X(removexattr) X(lremovexattr) X(fremovexattr) X(tkill) X(futex) X(sched_setaffinity) \
	X(sched_getaffinity) X(io_setup) X(io_destroy) X(io_getevents) X(io_submit) X(io_cancel) \
	X(remap_file_pages) X(getdents64) X(set_tid_address) X(restart_syscall) X(semtimedop) X(fadvise64) \
	X(timer_create) X(timer_settime) X(timer_gettime) X(timer_getoverrun) X(timer_delete) X(clock_gettime) \
	X(clock_getres) X(clock_nanosleep) X(exit_group) X(epoll_ctl) X(tgkill) X(mq_open) X(mq_unlink) \
	X(mq_timedsend) X(mq_timedreceive) X(mq_notify) X(mq_getsetattr) X(waitid) X(ioprio_set) X(ioprio_get) \
	X(inotify_add_watch) X(inotify_rm_watch) X(openat) X(mkdirat) X(mknodat) X(fchownat) X(newfstatat) \
	X(unlinkat) X(renameat) X(linkat) X(symlinkat) X(readlinkat) X(fchmodat) X(faccessat) X(pselect6) \
	X(ppoll) X(set_robust_list) X(get_robust_list) X(splice) X(tee) X(sync_file_range) X(vmsplice) \
	X(utimensat) X(epoll_pwait) X(timerfd_create) X(fallocate) X(timerfd_settime) X(timerfd_gettime) \
	X(accept4) X(signalfd4) X(eventfd2) X(epoll_create1) X(dup3) X(pipe2) X(inotify_init1) X(preadv) \
	X(pwritev) X(rt_tgsigqueueinfo) X(recvmmsg) X(prlimit64) X(syncfs) X(sendmmsg) X(getcpu) \
	X(process_vm_readv) X(process_vm_writev) X(kcmp) X(sched_setattr) X(sched_getattr) X(renameat2) \
	X(seccomp) X(getrandom) X(memfd_create) X(execveat) X(membarrier) X(mlock2) X(copy_file_range) \
	X(preadv2) X(pwritev2) X(pkey_mprotect) X(pkey_alloc) X(pkey_free) X(statx) X(io_pgetevents) X(rseq) \
	X(pidfd_send_signal) X(pidfd_open) X(close_range) X(openat2) X(pidfd_getfd) X(faccessat2) \
	X(epoll_pwait2)

#define SYSCALLS_X86_64(X) \
	X(open) X(stat) X(lstat) X(poll) X(access) X(pipe) X(select) X(dup2) X(pause) X(alarm) X(fork) X(vfork) \
	X(getdents) X(rename) X(mkdir) X(rmdir) X(creat) X(link) X(unlink) X(symlink) X(readlink) X(chmod) \
	X(chown) X(lchown) X(getpgrp) X(utime) X(mknod) X(modify_ldt) X(arch_prctl) X(time) X(set_thread_area) \
	X(get_thread_area) X(epoll_create) X(epoll_wait) X(utimes) X(inotify_init) X(futimesat) X(signalfd) \
	X(eventfd) X(name_to_handle_at)

/* Newer than some C libraries. The numbers are the same on all architectures. */
#define SYSCALLS_NEW(X) \
	X(landlock_create_ruleset,444) X(landlock_add_rule,445) X(landlock_restrict_self,446) \
	X(process_mrelease,448) X(futex_waitv,449) X(cachestat,451) X(fchmodat2,452) \
	X(map_shadow_stack,453) X(futex_wake,454) X(futex_wait,455) X(futex_requeue,456) X(mseal,462) \
	X(getxattrat,464) X(listxattrat,465) X(removexattrat,466)

/* Calls above this number return ENOSYS, so that programs fall back. */
#define SYSCALLS_KNOWN 466
