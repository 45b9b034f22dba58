/* Init as the first process of a virtual machine. It is /init of the initial RAM file system, so nothing runs before it.
 *
 * The kernel's command line says what to do:
 *   dutyfree.modules=A,B    load /modules/A.ko, then B
 *   dutyfree.lower=N        read-only disks with the serials lower0 (the topmost) to lowerN-1, of ext4
 *   dutyfree.upper=BYTES    what is written goes to memory, at most so many bytes; or "disk": to the disk "upper"
 *   dutyfree.pids=N         so many processes
 *   dutyfree.network=WHAT   the network of QEMU's user mode: "all", or "local" without a way out
 *
 * Then it waits for the owner's word. A machine may be saved at this point and continued many times, hours later: so
 * the clock, the seed of the random numbers and the names come with the word, whether it was saved or not. */
#include "setup/machine.h"

#include "pid1/init.h"
#include "setup/guest.h"
#include "sys.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/random.h>
#include <net/if.h>
#include <net/route.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PORT "/dev/vport0p1"
#define DISKS_MAX 20
#define DEVICE_NS 20000000000u /* how long a device may take to appear */
#define WORK "/workspace"
#define GROUP "/sys/fs/cgroup/sandbox"
#define RNDRESEEDCRNG_ _IO('R', 0x07) /* Linux 5.17 */

#define ADDRESS "10.0.2.15"
#define GATEWAY "10.0.2.2"
#define NAMESERVER "10.0.2.3"

/* What the owner sends before all frames. */
struct word {
	char magic[8];
	uint64_t time; /* CLOCK_REALTIME, nanoseconds */
	unsigned char seed[64];
	char name[64];    /* host name */
	char machine[32]; /* machine-id */
};

static char command_line[4096];

static int fail(const char *what, int error)
{
	fprintf(stderr, "dutyfree-init: %s: %s\n", what, strerror(error));
	return 70;
}

/* The value of an option of the command line, "" if it has none, or NULL if it is not there. */
static const char *option(const char *name)
{
	static char value[1024];
	size_t length = strlen(name);

	for (const char *at = command_line; (at = strstr(at, name)); at += length) {
		if ((at != command_line && at[-1] != ' ') || !strchr("= \n", at[length]))
			continue;
		at += length;
		size_t size = *at == '=' ? strcspn(++at, " \n") : 0;
		if (size >= sizeof value)
			return NULL;
		memcpy(value, at, size);
		value[size] = 0;
		return value;
	}
	return NULL;
}

static void write_text(const char *path, const char *text)
{
	AUTOCLOSE int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	if (fd >= 0)
		write_all(fd, text, strlen(text));
}

/* --- Devices and mounts --------------------------------------------------------------------------- */

static int mount_at(const char *type, const char *path, unsigned long flags, const char *data)
{
	mkdir(path, 0755);
	return mount(type, path, type, flags, data) < 0 ? -errno : 0;
}

static int mount_kernel_files(void)
{
	int error = mount_at("proc", "/proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);

	if (!error)
		error = mount_at("sysfs", "/sys", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	if (!error)
		error = mount_at("devtmpfs", "/dev", MS_NOSUID, "mode=0755");
	return error == -EBUSY ? 0 : error;
}

static int load_modules(const char *names)
{
	char copy[1024], path[256], *rest = copy;

	snprintf(copy, sizeof copy, "%s", names);
	for (char *name; (name = strsep(&rest, ","));) {
		snprintf(path, sizeof path, "/modules/%s.ko", name);
		AUTOCLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0 || syscall(SYS_finit_module, fd, "", 0) < 0)
			return fail(path, errno);
	}
	return 0;
}

/* Drivers find their devices in the background. */
static bool wait_more(uint64_t begin)
{
	usleep(500);
	return now() - begin < DEVICE_NS;
}

/* The device file of the disk with a serial. */
static int find_disk(const char *serial, char *path, size_t size)
{
	char file[300], found[64];
	uint64_t begin = now();

	do {
		DIR *entries = opendir("/sys/block");
		for (struct dirent *entry; entries && (entry = readdir(entries));) {
			snprintf(file, sizeof file, "/sys/block/%s/serial", entry->d_name);
			ssize_t length = read_file(AT_FDCWD, file, found, sizeof found - 1);
			if (length < 0)
				continue;
			found[length] = 0;
			found[strcspn(found, "\n")] = 0;
			if (strcmp(found, serial) == 0) {
				snprintf(path, size, "/dev/%s", entry->d_name);
				closedir(entries);
				return 0;
			}
		}
		if (entries)
			closedir(entries);
	} while (wait_more(begin));
	return -ENODEV;
}

static int mount_disk(const char *serial, const char *path, unsigned long flags)
{
	char device[300];
	int error = find_disk(serial, device, sizeof device);

	if (error)
		return error;
	mkdir(path, 0755);
	return mount(device, path, "ext4", flags, NULL) < 0 ? -errno : 0;
}

/* The root: the disks below, and above them a file system of this machine alone. */
static int mount_root(void)
{
	const char *found = option("dutyfree.lower");
	unsigned count = found ? (unsigned)strtoul(found, NULL, 10) : 0;
	char path[32], serial[32], data[DISKS_MAX * 16 + 64] = "lowerdir=";
	int error;

	if (!count || count > DISKS_MAX)
		return fail("dutyfree.lower", EINVAL);
	for (unsigned i = 0; i < count; i++) {
		snprintf(serial, sizeof serial, "lower%u", i);
		snprintf(path, sizeof path, "/l%u", i);
		error = mount_disk(serial, path, MS_RDONLY | MS_NOATIME);
		if (error)
			return fail(serial, -error);
		snprintf(data + strlen(data), sizeof data - strlen(data), "%s%s", i ? ":" : "", path);
	}
	const char *upper = option("dutyfree.upper");
	if (upper && strcmp(upper, "disk") == 0) {
		error = mount_disk("upper", "/upper", MS_NOATIME);
	} else {
		char size[64];
		snprintf(size, sizeof size, "mode=0755,size=%s", upper ? upper : "50%");
		error = mount_at("tmpfs", "/upper", 0, size);
	}
	if (error)
		return fail("upper", -error);
	mkdir("/upper/files", 0755);
	mkdir("/upper/work", 0755);
	snprintf(data + strlen(data), sizeof data - strlen(data), ",upperdir=/upper/files,workdir=/upper/work,redirect_dir=on,metacopy=on");
	error = mount_at("overlay", "/root", 0, data);
	return error ? fail("overlay", -error) : 0;
}

/* Make the root that of all processes, with the file systems that programs expect. */
static int enter_root(void)
{
	static const char *const moved[] = {"/proc", "/sys", "/dev"};
	char path[32];

	for (size_t i = 0; i < sizeof moved / sizeof *moved; i++) {
		snprintf(path, sizeof path, "/root%s", moved[i]);
		mkdir(path, 0755);
		if (mount(moved[i], path, NULL, MS_MOVE, NULL) < 0)
			return fail(path, errno);
	}
	/* The files of the initial RAM file system would stay in memory. */
	remove_tree("/modules", 0);
	if (chdir("/root") < 0 || mount(".", "/", NULL, MS_MOVE, NULL) < 0 || chroot(".") < 0 || chdir("/") < 0)
		return fail("/root", errno);
	mount_at("devpts", "/dev/pts", MS_NOSUID | MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666");
	mount_at("tmpfs", "/dev/shm", MS_NOSUID | MS_NODEV, "mode=1777");
	mount_at("tmpfs", "/run", MS_NOSUID | MS_NODEV, "mode=0755");
	mount_at("cgroup2", "/sys/fs/cgroup", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
	symlink("/proc/self/fd", "/dev/fd");
	symlink("/proc/self/fd/0", "/dev/stdin");
	symlink("/proc/self/fd/1", "/dev/stdout");
	symlink("/proc/self/fd/2", "/dev/stderr");
	rmdir("/lost+found"); /* of the disks */
	/* As in a container, the limit of memory kills, and refuses nothing before. */
	write_file(AT_FDCWD, "/proc/sys/vm/overcommit_memory", "1");
	mkdir("/tmp", 01777);
	chmod("/tmp", 01777);
	mkdir(WORK, 0755);
	/* The kernel's own threads share our directory until here, and what is in the working directory is the sandbox's. */
	if (unshare(CLONE_FS) < 0)
		return fail("unshare", errno);
	return chdir(WORK) < 0 ? fail(WORK, errno) : 0;
}

/* Init is one of the processes that the group counts. */
static int limit_processes(const char *most)
{
	char count[32];
	int error = write_file(AT_FDCWD, "/sys/fs/cgroup/cgroup.subtree_control", "+pids");

	snprintf(count, sizeof count, "%lu", strtoul(most, NULL, 10) + 1);
	mkdir(GROUP, 0755);
	if (!error)
		error = write_file(AT_FDCWD, GROUP "/pids.max", count);
	if (!error)
		error = write_file(AT_FDCWD, GROUP "/cgroup.procs", "0");
	return error ? fail("dutyfree.pids", -error) : 0;
}

/* --- Network --------------------------------------------------------------------------------------- */

static void set_address(struct sockaddr *target, const char *address)
{
	struct sockaddr_in given = {.sin_family = AF_INET};

	inet_pton(AF_INET, address, &given.sin_addr);
	memcpy(target, &given, sizeof given);
}

static int bring_up(int fd, const char *name)
{
	struct ifreq request = {0};

	snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
	if (ioctl(fd, SIOCGIFFLAGS, &request) < 0)
		return -errno;
	request.ifr_flags |= IFF_UP;
	return ioctl(fd, SIOCSIFFLAGS, &request) < 0 ? -errno : 0;
}

static int configure(int fd, const char *name, bool has_route)
{
	struct ifreq request = {0};
	struct rtentry route = {.rt_flags = RTF_UP | RTF_GATEWAY};
	uint64_t begin = now();

	snprintf(request.ifr_name, sizeof request.ifr_name, "%s", name);
	while (ioctl(fd, SIOCGIFINDEX, &request) < 0)
		if (!wait_more(begin))
			return -ENODEV;
	set_address(&request.ifr_addr, ADDRESS);
	if (ioctl(fd, SIOCSIFADDR, &request) < 0)
		return -errno;
	set_address(&request.ifr_netmask, "255.255.255.0");
	if (ioctl(fd, SIOCSIFNETMASK, &request) < 0)
		return -errno;
	int error = bring_up(fd, name);
	if (error || !has_route)
		return error;
	set_address(&route.rt_dst, "0.0.0.0");
	set_address(&route.rt_genmask, "0.0.0.0");
	set_address(&route.rt_gateway, GATEWAY);
	return ioctl(fd, SIOCADDRT, &route) < 0 ? -errno : 0;
}

static int start_network(void)
{
	AUTOCLOSE int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	int error = fd < 0 ? -errno : bring_up(fd, "lo");

	const char *network = option("dutyfree.network");
	if (!error && network && strcmp(network, "local") == 0) {
		error = configure(fd, "eth0", false);
	} else if (!error && network) {
		error = configure(fd, "eth0", true);
		unlink("/etc/resolv.conf");
		write_text("/etc/resolv.conf", "nameserver " NAMESERVER "\n");
	}
	return error ? fail("network", -error) : 0;
}

/* --- The owner's word ------------------------------------------------------------------------------ */

/* The kernel forgets the random numbers that a saved machine and its copies share. */
static int reseed(const unsigned char *seed, size_t size)
{
	struct {
		struct rand_pool_info info;
		unsigned char seed[64];
	} pool = {.info = {.entropy_count = (int)size * 8, .buf_size = (int)size}};
	AUTOCLOSE int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);

	memcpy(pool.info.buf, seed, size);
	if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) < 0 || ioctl(fd, RNDRESEEDCRNG_) < 0)
		return fail("/dev/urandom", errno);
	return 0;
}

static int obey(const struct word *word)
{
	char text[256];
	struct timespec time = {.tv_sec = (time_t)(word->time / 1000000000u), .tv_nsec = (long)(word->time % 1000000000u)};

	if (clock_settime(CLOCK_REALTIME, &time) < 0)
		return fail("clock", errno);
	int error = reseed(word->seed, sizeof word->seed);
	if (error)
		return error;
	if (sethostname(word->name, strnlen(word->name, sizeof word->name)) < 0)
		return fail("hostname", errno);
	snprintf(text, sizeof text, "%.*s\n", (int)sizeof word->machine, word->machine);
	write_text("/etc/machine-id", text);
	snprintf(text, sizeof text, "%.*s\n", (int)sizeof word->name, word->name);
	write_text("/etc/hostname", text);
	snprintf(text, sizeof text, "127.0.0.1 localhost %.*s\n::1 localhost\n", (int)sizeof word->name, word->name);
	write_text("/etc/hosts", text);
	return 0;
}

static int open_port(void)
{
	uint64_t begin = now();
	int fd;

	while ((fd = open(PORT, O_RDWR)) < 0 && wait_more(begin))
		;
	if (fd < 0)
		return -errno;
	/* The numbers of stdin and stdout, where guest.c looks for the stream. */
	if (dup2(fd, 0) < 0 || dup2(fd, 1) < 0)
		return -errno;
	if (fd > 1)
		close(fd);
	return 0;
}

static int greet(void)
{
	return write_all(1, guest_preamble, sizeof guest_preamble - 1);
}

/* The owner of a copy does not know when we run again, so it asks. */
static int read_word(struct word *word)
{
	static const char magic[8] = "dutyfree";
	int error = greet();

	for (size_t have = 0; !error && have < sizeof *word;) {
		ssize_t size = read(0, (char *)word + have, have ? sizeof *word - have : 1);
		if (size < 0 && errno == EINTR)
			continue;
		if (size <= 0)
			return size ? -errno : -EPIPE;
		if (!have && word->magic[0] == '?')
			error = greet();
		else
			have += (size_t)size;
	}
	if (error)
		return error;
	return memcmp(word->magic, magic, sizeof magic) ? -EPROTO : 0;
}

static int prepare(void)
{
	const char *given;
	int error = mount_kernel_files();

	if (error)
		return fail("mount", -error);
	ssize_t size = read_file(AT_FDCWD, "/proc/cmdline", command_line, sizeof command_line - 1);
	command_line[size < 0 ? 0 : size] = 0;
	given = option("dutyfree.modules");
	error = given ? load_modules(given) : 0;
	if (!error)
		error = mount_root();
	if (!error)
		error = enter_root();
	if (!error)
		error = start_network();
	given = error ? NULL : option("dutyfree.pids");
	return given ? limit_processes(given) : error;
}

int machine_run(void)
{
	struct word word;

	if (getpid() != 1) {
		fputs("dutyfree-init: machine must be the first process of a virtual machine\n", stderr);
		return 64;
	}
	umask(022);
	is_machine = true;
	int error = prepare();
	if (error)
		return error;
	error = open_port();
	if (!error)
		error = read_word(&word);
	if (error)
		return fail(PORT, -error);
	error = obey(&word);
	return error ? error : guest_serve(false);
}

/* --- The time stamp counter ------------------------------------------------------------------------ */

static uint64_t read_tsc(void)
{
#ifdef __x86_64__
	return __builtin_ia32_rdtsc();
#else
	return 0;
#endif
}

int machine_print_tsc(void)
{
	static const uint64_t long_enough = 100000000;
	uint64_t begin = now(), first = read_tsc(), end, last;

	do {
		usleep(10000);
		end = now();
		last = read_tsc();
	} while (end - begin < long_enough);
	printf("%llu\n", (unsigned long long)((last - first) * 1000000u / (end - begin)));
	return 0;
}
