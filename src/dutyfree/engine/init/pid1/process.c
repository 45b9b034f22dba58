/* Start the process of a command, and find and kill it with all its descendants.
 *
 * Descendants inherit a mark that they cannot change: the hard limit RLIMIT_RTTIME, which has no effect without
 * real-time priority. To raise it takes a capability that no process here has, and the seccomp filter lets only init
 * lower it. Otherwise a process could copy the mark of a newer command, since anyone can read marks in
 * /proc/PID/limits. A process cannot hide by another session, parent, environment, user or name. */
#include "launcher/host.h"
#include "pid1/init.h"
#include "setup/seccomp.h"
#include "sys.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define FIRST_MARK (1ull << 60)
#define DEPTH_MAX 4096 /* generations of processes */
#define LINES_MAX 8192 /* lines of /etc/passwd that are read */
#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

static uint64_t last_mark = FIRST_MARK;
static int mark_limit = RLIMIT_RTTIME;

void process_choose_mark(void)
{
	struct rlimit found;

	/* gVisor cannot set it. It does not enforce the number of processes per user, so that limit is the mark there. */
	if (getrlimit(RLIMIT_RTTIME, &found) < 0 || (setrlimit(RLIMIT_RTTIME, &found) < 0 && errno == EPERM))
		mark_limit = RLIMIT_NPROC;
}

uint64_t process_mark(void)
{
	return --last_mark;
}

int process_set_mark(pid_t pid, uint64_t mark)
{
	const struct rlimit limit = {mark, mark};

	/* With the token for the seccomp filter. */
	long result = syscall(SYS_prlimit64, pid, mark_limit, &limit, NULL, seccomp_token[0], seccomp_token[1]);

	return result < 0 ? -errno : 0;
}

/* --- Start --------------------------------------------------------------------------------------- */

struct identity {
	uid_t user;
	gid_t group;
};

/* The sandbox may have replaced the file by a pipe or device. Open only a regular file, without blocking. */
static FILE *open_regular(const char *path)
{
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	struct stat found;

	if (fd >= 0 && (fstat(fd, &found) < 0 || !S_ISREG(found.st_mode)))
		close_fd(&fd);
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	if (!file)
		close_fd(&fd);
	return file;
}

/* Find a line of a file like /etc/passwd by name or by number, and return the numbers in it. */
static bool find_line(const char *path, const char *key, unsigned long number, unsigned *first, unsigned *second)
{
	char line[1024], name[256];
	bool numeric = number != ULONG_MAX, found = false;
	FILE *file = open_regular(path);

	for (int lines = 0; file && !found && lines < LINES_MAX && fgets(line, sizeof line, file); lines++) {
		*second = 0;
		found = sscanf(line, "%255[^:]:%*[^:]:%u:%u", name, first, second) >= 2 &&
			(numeric ? *first == number : strcmp(name, key) == 0);
	}
	if (file)
		fclose(file);
	return found;
}

/* The id in a text, or ULONG_MAX if it is not an id of the sandbox. */
static unsigned long id_number(const char *text)
{
	char *end;
	unsigned long number = strtoul(text, &end, 10);

	return isdigit((unsigned char)*text) && !*end && number < IDS ? number : ULONG_MAX;
}

/* Look up "user" or "user:group" in the sandbox's own /etc/passwd and /etc/group, by name or number. A number needs no
 * entry. */
static bool find_user(const char *text, struct identity *found)
{
	char name[256];
	const char *colon = strchr(text, ':');
	size_t length = colon ? (size_t)(colon - text) : strlen(text);
	unsigned user, group, unused;

	if (length >= sizeof name)
		return false;
	memcpy(name, text, length);
	name[length] = 0;
	unsigned long number = id_number(name);
	if (find_line("/etc/passwd", name, number, &user, &group))
		*found = (struct identity){user, group};
	else if (number != ULONG_MAX)
		*found = (struct identity){(uid_t)number, (gid_t)number};
	else
		return false;
	if (colon && colon[1]) {
		number = id_number(colon + 1);
		if (number == ULONG_MAX && !find_line("/etc/group", colon + 1, number, &group, &unused))
			return false;
		found->group = number == ULONG_MAX ? group : (gid_t)number;
	}
	/* The sandbox wrote these files. setresuid(-1) would change nothing and stay root. */
	return found->user < IDS && found->group < IDS;
}

static struct identity identity; /* of the process being started */

/* Returns only on failure, an errno. */
static int run_program(const struct start *start)
{
	const char *name = start->arguments[0], *path = DEFAULT_PATH;
	char full[PATH_MAX];
	int error = ENOENT;

	if (strchr(name, '/') || !*name) {
		execve(name, start->arguments, start->environment);
		return errno;
	}
	for (char *const *entry = start->environment; *entry; entry++)
		if (strncmp(*entry, "PATH=", 5) == 0)
			path = *entry + 5;
	for (const char *at = path; at; at = strchr(at, ':') ? strchr(at, ':') + 1 : NULL) {
		int length = (int)strcspn(at, ":");
		int size = snprintf(full, sizeof full, "%.*s%s%s", length, at, length ? "/" : "./", name);
		if (size < 0 || (size_t)size >= sizeof full)
			continue;
		execve(full, start->arguments, start->environment);
		if (errno == EACCES)
			error = EACCES;
		else if (errno != ENOENT && errno != ENOTDIR)
			return errno;
	}
	return error;
}

/* Rootless: all sandboxes and their owner are one user for the kernel, which limits that user's descriptors in transit
 * by the sender's RLIMIT_NOFILE. Commands get half of ours, so that they cannot keep init, the launcher and the owner
 * from sending. */
static int limit_files(void)
{
	struct rlimit files;

	if (!host.rootless)
		return 0;
	if (getrlimit(RLIMIT_NOFILE, &files) < 0)
		return -1;
	files.rlim_cur = files.rlim_max /= 2;
	return setrlimit(RLIMIT_NOFILE, &files);
}

/* In the child, which shares our memory until its exec. It reports errors in `start`. */
static int child(void *argument)
{
	struct start *start = argument;
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2] = {{COMMAND_CAPABILITIES, COMMAND_CAPABILITIES, 0}, {0, 0, 0}};
	sigset_t none;

	setsid();
	start->flags = EXIT_NO_PROCESS;
	if (dup2(start->input, 0) < 0 || dup2(start->output, 1) < 0 || dup2(start->errors, 2) < 0 ||
	    (start->socket && dup2(start->socket, SERVICE_FD) < 0) || process_set_mark(0, start->mark) < 0 ||
	    limit_files() < 0)
		goto failed;
	if (start->terminal && ioctl(0, TIOCSCTTY, 0) < 0)
		goto failed;
	start->flags = EXIT_NO_USER;
	if (start->terminal && *start->user && fchown(0, identity.user, -1) < 0)
		goto failed;
	/* Raw system calls: those of the C library would apply to all our threads. */
	/* Rootless: EPERM where setgroups is denied. */
	if (*start->user && ((syscall(SYS_setgroups, 0, NULL) < 0 && errno != EPERM) ||
			     syscall(SYS_setresgid, identity.group, identity.group, identity.group) < 0 ||
			     syscall(SYS_setresuid, identity.user, identity.user, identity.user) < 0))
		goto failed;
	/* A guest leaves root the capabilities that its runtime gives it. */
	if (!is_guest && (!*start->user || identity.user == 0) && syscall(SYS_capset, &header, data) < 0)
		goto failed;
	start->flags = EXIT_NO_DIRECTORY;
	/* Close it before chdir: /proc/self/fd must not lead to a directory of the host (CVE-2024-21626). */
	if (payload_group >= 0)
		close(payload_group);
	if (*start->directory && chdir(start->directory) < 0)
		goto failed;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	start->flags = EXIT_NOT_STARTED;
	start->executing = now();
	errno = run_program(start);
failed:
	start->error = errno;
	_exit(127);
}

pid_t process_start(struct start *start)
{
	if (*start->user && !find_user(start->user, &identity)) {
		start->flags = EXIT_NO_USER;
		start->error = ENOENT;
		return -1;
	}
	pid_t pid = spawn_child(child, start, payload_group);
	if (pid < 0) {
		start->flags = EXIT_NO_PROCESS;
		start->error = -pid;
		return -1;
	}
	if (start->error) {
		waitpid(pid, NULL, 0);
		return -1;
	}
	start->flags = 0;
	return pid;
}

/* --- Kill ---------------------------------------------------------------------------------------- */

/* Whether a process has ended with all its threads. The first thread may end before the others. */
static bool has_ended(int proc, const char *pid)
{
	char path[32], text[512], state;
	long threads;

	snprintf(path, sizeof path, "%.16s/stat", pid);
	if (read_file(proc, path, text, sizeof text) < 0)
		return true;
	char *rest = strrchr(text, ')');
	return rest &&
	       sscanf(rest, ") %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %ld", &state,
		      &threads) == 2 &&
	       (state == 'Z' || state == 'X') && threads <= 1;
}

/* A tracer is told of the end first and could hide it from us. Kill it. */
static void kill_tracer(int proc, const char *pid)
{
	char path[32], text[512];
	int tracer;

	snprintf(path, sizeof path, "%.16s/status", pid);
	if (read_file(proc, path, text, sizeof text) < 0)
		return;
	char *line = strstr(text, "\nTracerPid:");
	if (line && sscanf(line, " TracerPid: %d", &tracer) == 1 && tracer > 1)
		kill(tracer, SIGKILL);
}

/* From /proc: prlimit() of a process of another user takes CAP_SYS_RESOURCE, which we lack as a guest or without a user
 * namespace. */
static uint64_t read_mark(int proc, pid_t pid)
{
	static const char title[] = "\nMax realtime timeout";
	char path[32], text[4096];
	unsigned long long mark;

	snprintf(path, sizeof path, "%d/limits", (int)pid);
	if (read_file(proc, path, text, sizeof text) < 0)
		return 0;
	const char *line = strstr(text, title);
	return line && sscanf(line + sizeof title - 1, "%*s %llu", &mark) == 1 ? mark : 0;
}

static bool has_mark(int proc, pid_t pid, uint64_t mark)
{
	struct rlimit found;

	if (prlimit(pid, mark_limit, NULL, &found) < 0)
		found.rlim_max = errno == EPERM ? read_mark(proc, pid) : 0;
	/* No filter keeps a process of a guest from lowering its mark. One that was never given is no one else's. */
	return found.rlim_max == mark || (is_guest && found.rlim_max && found.rlim_max < last_mark);
}

static pid_t parent_of(int proc, pid_t pid)
{
	char path[32], text[512];
	int parent;

	snprintf(path, sizeof path, "%d/stat", (int)pid);
	if (read_file(proc, path, text, sizeof text) < 0)
		return 0;
	const char *rest = strrchr(text, ')');
	return rest && sscanf(rest, ") %*c %d", &parent) == 1 ? parent : 0;
}

/* We adopt orphans, so every process that a command started stays below us. */
static bool is_descendant(int proc, pid_t pid)
{
	pid_t ours = getpid();

	for (int depth = 0; pid > 1 && depth < DEPTH_MAX; depth++) {
		pid = parent_of(proc, pid);
		if (pid == ours)
			return true;
	}
	return false;
}

static unsigned signal_descendants(int number)
{
	DIR *proc = opendir("/proc");
	unsigned count = 0;

	for (struct dirent *entry; proc && (entry = readdir(proc));) {
		pid_t pid = (pid_t)atoi(entry->d_name);
		if (pid > 1 && is_descendant(dirfd(proc), pid) && !has_ended(dirfd(proc), entry->d_name)) {
			kill(pid, number);
			count++;
		}
	}
	if (proc)
		closedir(proc);
	return count;
}

unsigned process_signal_descendants(int number)
{
	unsigned before, found = 0;

	/* Those that a process starts meanwhile are found in the next turn. Stopped ones start none. */
	for (int turn = 0; turn < 50 && (number == SIGSTOP || number == SIGKILL); turn++) {
		before = found;
		found = signal_descendants(SIGSTOP);
		if (found == before)
			break;
	}
	return number == SIGSTOP ? found : signal_descendants(number);
}

/* Signal all processes with the mark. Returns how many are alive. */
static unsigned signal_marked(uint64_t mark, pid_t spared, int number)
{
	DIR *proc = opendir("/proc");
	unsigned count = 0;

	for (struct dirent *entry; proc && (entry = readdir(proc));) {
		pid_t pid = (pid_t)atoi(entry->d_name);
		if (pid <= 1 || pid == spared || !has_mark(dirfd(proc), pid, mark) ||
		    (shares_pids && !is_descendant(dirfd(proc), pid)))
			continue;
		if (!has_ended(dirfd(proc), entry->d_name)) {
			kill(pid, number);
			count++;
		} else if (number == SIGKILL) {
			kill_tracer(dirfd(proc), entry->d_name);
		}
	}
	if (proc)
		closedir(proc);
	return count;
}

void process_kill_marked(uint64_t mark, pid_t spared)
{
	/* Stop all before killing one: otherwise a shell whose child dies would run its next line. Stopped processes
	 * cannot fork, so the loop ends. */
	for (int round = 0; round < 100; round++) {
		unsigned before = 0, found;
		for (int turn = 0; turn < 50; turn++, before = found) {
			found = signal_marked(mark, spared, SIGSTOP);
			if (found == before)
				break;
		}
		if (signal_marked(mark, spared, SIGKILL) == 0)
			return;
		if (round > 1)
			usleep(500); /* they need CPU time to die */
	}
}
