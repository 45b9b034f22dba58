#include "sys.h"

#include "setup/seccomp.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

bool is_guest, is_machine, is_remote, shares_pids;

void close_at(int *fd)
{
	if (*fd >= 0)
		close(*fd);
}

void close_fd(int *fd)
{
	close_at(fd);
	*fd = -1;
}

void close_from(int first)
{
	if (syscall(SYS_close_range, first, ~0u, 0) == 0)
		return;
	/* An older kernel, or a filter that does not know the call. */
	struct rlimit files;
	if (getrlimit(RLIMIT_NOFILE, &files) < 0 || files.rlim_cur > 65536)
		files.rlim_cur = 65536;
	for (int fd = first; fd < (int)files.rlim_cur; fd++)
		close(fd);
}

uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int write_all(int fd, const void *data, size_t size)
{
	const char *at = data;

	while (size > 0) {
		ssize_t count = write(fd, at, size);
		if (count < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		at += count;
		size -= (size_t)count;
	}
	return 0;
}

int write_file(int dir, const char *path, const char *text)
{
	AUTOCLOSE int fd = openat(dir, path, O_WRONLY | O_CLOEXEC);

	/* Files in /proc, /sys and cgroupfs must be written with one write(). */
	if (fd < 0 || write(fd, text, strlen(text)) < 0)
		return -errno;
	return 0;
}

ssize_t read_file(int dir, const char *path, char *buffer, size_t size)
{
	AUTOCLOSE int fd = openat(dir, path, O_RDONLY | O_CLOEXEC);
	size_t have = 0;

	if (fd < 0)
		return -errno;
	while (have < size - 1) {
		ssize_t count = read(fd, buffer + have, size - 1 - have);
		if (count < 0)
			return -errno;
		if (count == 0)
			break;
		have += (size_t)count;
	}
	buffer[have] = 0;
	return (ssize_t)have;
}

bool suid_dumpable_is_on(void)
{
	char text[16];

	return read_file(AT_FDCWD, "/proc/sys/fs/suid_dumpable", text, sizeof text) > 0 && atoi(text) == 1;
}

int open_no_magiclinks(int dir, const char *path, int flags, mode_t mode, uint64_t resolve)
{
	struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC),
			       .mode = flags & O_CREAT ? mode : 0,
			       .resolve = RESOLVE_NO_MAGICLINKS | resolve};
	long fd = syscall(SYS_openat2, dir, path, &how, sizeof how);

	/* The filter of another runtime may not know it. What a link in /proc leads to is then refused by its type. */
	if (fd < 0 && is_guest && (errno == ENOSYS || errno == EPERM))
		fd = openat(dir, path, flags | O_CLOEXEC, mode);
	return fd < 0 ? -errno : (int)fd;
}

static int send_parts(int socket, const void *a, size_t a_size, const void *b, size_t b_size, const int *fds, int count,
		      int flags)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(MESSAGE_FDS * sizeof(int))];
	} control;
	struct iovec parts[2] = {{(void *)a, a_size}, {(void *)b, b_size}};
	struct msghdr message = {.msg_iov = parts, .msg_iovlen = b_size ? 2 : 1};

	if (count > 0) {
		memset(&control, 0, CMSG_SPACE((size_t)count * sizeof(int)));
		message.msg_control = control.space;
		message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
		struct cmsghdr *header = CMSG_FIRSTHDR(&message);
		header->cmsg_level = SOL_SOCKET;
		header->cmsg_type = SCM_RIGHTS;
		header->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
		memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof(int));
	}
	while (sendmsg(socket, &message, MSG_NOSIGNAL | flags) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

int send_message(int socket, const void *a, size_t a_size, const void *b, size_t b_size, const int *fds, int count)
{
	return send_parts(socket, a, a_size, b, b_size, fds, count, 0);
}

int send_message_now(int socket, const void *data, size_t size, int fd)
{
	return send_parts(socket, data, size, NULL, 0, &fd, 1, MSG_DONTWAIT);
}

ssize_t receive_message(int socket, void *data, size_t size, int flags, int *fds, size_t room, size_t *count)
{
	union {
		struct cmsghdr align;
		char space[CMSG_SPACE(MESSAGE_FDS * sizeof(int))];
	} control;
	struct iovec part = {data, size};
	struct msghdr message = {.msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = control.space,
				 .msg_controllen = CMSG_LEN(room * sizeof(int))};
	ssize_t received = recvmsg(socket, &message, flags | MSG_CMSG_CLOEXEC);
	const struct cmsghdr *rights = received < 0 ? NULL : CMSG_FIRSTHDR(&message);

	*count = 0;
	if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
		*count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		memcpy(fds, CMSG_DATA(rights), *count * sizeof(int));
	}
	return received;
}

int receive_fd(int socket, void *data, size_t size, int *fd)
{
	size_t count;
	ssize_t received;

	do
		received = receive_message(socket, data, size, 0, fd, 1, &count);
	while (received < 0 && errno == EINTR);
	if (received < 0)
		count = 0;
	int error = received < 0 ? -errno : 0;
	if (!count)
		*fd = -1;
	return error ? error : received == (ssize_t)size ? 0 : -EPIPE;
}

int mount_new(const char *type, const char *const options[][2], unsigned attributes)
{
	AUTOCLOSE int context = (int)syscall(SYS_fsopen, type, FSOPEN_CLOEXEC);

	if (context < 0)
		return -errno;
	for (int i = 0; options && options[i][0]; i++)
		if (syscall(SYS_fsconfig, context, options[i][1] ? FSCONFIG_SET_STRING : FSCONFIG_SET_FLAG, options[i][0],
			    options[i][1], 0) < 0)
			return -errno;
	if (syscall(SYS_fsconfig, context, FSCONFIG_CMD_CREATE, NULL, NULL, 0) < 0)
		return -errno;
	int mount = (int)syscall(SYS_fsmount, context, FSMOUNT_CLOEXEC, attributes);
	return mount < 0 ? -errno : mount;
}

int mount_clone(int dir, const char *path, bool recursive)
{
	unsigned flags = OPEN_TREE_CLOEXEC | OPEN_TREE_CLONE | AT_EMPTY_PATH | (recursive ? AT_RECURSIVE : 0);
	int mount = (int)syscall(SYS_open_tree, dir, path, flags);

	return mount < 0 ? -errno : mount;
}

int mount_attach(int mount, const char *path)
{
	if (syscall(SYS_move_mount, mount, "", AT_FDCWD, path, MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return -errno;
	return 0;
}

int mount_restrict(int mount, uint64_t attributes, int user_namespace)
{
	struct mount_attr set = {.attr_set = attributes};

	if (user_namespace >= 0) {
		set.attr_set |= MOUNT_ATTR_IDMAP;
		set.userns_fd = (uint64_t)user_namespace;
	}
	if (syscall(SYS_mount_setattr, mount, "", AT_EMPTY_PATH | AT_RECURSIVE, &set, sizeof set) < 0)
		return -errno;
	return 0;
}

/* clone3 with the token that the seccomp filter asks for (seccomp.c). Inline, because a child on our stack must not
 * return from a function that the parent has not returned from. */
static inline __attribute__((always_inline)) long clone3_with_token(struct clone_args *args)
{
#if defined(__x86_64__)
	register uint64_t token0 __asm__("rdx") = seccomp_token[0];
	register uint64_t token1 __asm__("r10") = seccomp_token[1];
	long result;
	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "a"((long)SYS_clone3), "D"(args), "S"(sizeof *args), "r"(token0), "r"(token1)
			 : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_clone3;
	register long result __asm__("x0") = (long)args;
	register uint64_t size __asm__("x1") = sizeof *args;
	register uint64_t token0 __asm__("x2") = seccomp_token[0];
	register uint64_t token1 __asm__("x3") = seccomp_token[1];
	__asm__ volatile("svc 0"
			 : "+r"(result)
			 : "r"(number), "r"(size), "r"(token0), "r"(token1)
			 : "memory");
	return result;
#endif
}

/* Like vfork: the child uses our stack while we wait. */
static __attribute__((noinline)) pid_t clone_vm(int (*body)(void *), void *argument, uint64_t flags, int group)
{
	struct clone_args args = {.flags = CLONE_VM | CLONE_VFORK | flags, .exit_signal = SIGCHLD};

	if (group >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)group;
	}
	long pid = clone3_with_token(&args);
	if (pid == 0)
		_exit(body(argument));
	return (pid_t)pid;
}

pid_t spawn_child(int (*body)(void *), void *argument, int group)
{
	static char stack[64 << 10] __attribute__((aligned(16)));

	if (group >= 0)
		return clone_vm(body, argument, 0, group);
	pid_t pid = clone(body, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, argument);
	return pid < 0 ? -errno : pid;
}

int run_child(int (*body)(void *), void *argument, int group)
{
	int status;
	pid_t pid = clone_vm(body, argument, CLONE_FILES, group);

	if (pid < 0)
		return pid;
	if (waitpid(pid, &status, 0) < 0)
		return -errno;
	return WIFEXITED(status) ? -WEXITSTATUS(status) : -EIO;
}

pid_t fork_into(int group)
{
	struct clone_args args = {.exit_signal = SIGCHLD};

	if (group >= 0) {
		args.flags = CLONE_INTO_CGROUP;
		args.cgroup = (uint64_t)group;
	}
	long pid = group < 0 ? syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : clone3_with_token(&args);
	return pid >= 0 ? (pid_t)pid : group < 0 ? -errno : (pid_t)pid;
}

int pidfd_signal(int pidfd, int signal)
{
	return syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0) < 0 ? -errno : 0;
}
