/* One kind of kernel work in a loop. Prints the nanoseconds of one repetition.
 *
 * usage: walls KIND TIMES [FILE]. walls.py runs it in sandboxes with different isolation. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SMALL_FILES 2000
#define TOUCHED (200u << 20)

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void must(long result)
{
	if (result < 0) {
		perror("walls");
		exit(1);
	}
}

static void null_call(const char *unused)
{
	(void)unused;
	must(syscall(SYS_getppid));
}

static void stat_file(const char *path)
{
	struct stat found;

	must(stat(path, &found));
}

static void open_read_close(const char *path)
{
	char text[4096];
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	must(fd);
	must(read(fd, text, sizeof text));
	close(fd);
}

/* In the working directory. */
static void write_and_remove(const char *unused)
{
	char name[32], text[1000];

	(void)unused;
	memset(text, 'x', sizeof text);
	for (int i = 0; i < SMALL_FILES; i++) {
		snprintf(name, sizeof name, "small%d", i);
		int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
		must(fd);
		must(write(fd, text, sizeof text));
		close(fd);
	}
	for (int i = 0; i < SMALL_FILES; i++) {
		snprintf(name, sizeof name, "small%d", i);
		must(unlink(name));
	}
}

static void touch_memory(const char *unused)
{
	char *memory = mmap(NULL, TOUCHED, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)unused;
	must(memory == MAP_FAILED ? -1 : 0);
	for (size_t at = 0; at < TOUCHED; at += 4096)
		memory[at] = 1;
	munmap(memory, TOUCHED);
}

static void compute(const char *unused)
{
	volatile uint64_t sum = 0;

	(void)unused;
	for (uint64_t i = 0; i < 10000000; i++)
		sum = sum * 31 + i;
}

static const struct {
	const char *name;
	void (*run)(const char *path);
} kinds[] = {{"null", null_call},          {"stat", stat_file},     {"read", open_read_close},
	     {"files", write_and_remove}, {"touch", touch_memory}, {"compute", compute}};

int main(int argc, char **argv)
{
	long times = argc > 2 ? atol(argv[2]) : 0;

	for (size_t i = 0; times > 0 && i < sizeof kinds / sizeof *kinds; i++) {
		if (strcmp(argv[1], kinds[i].name) != 0)
			continue;
		kinds[i].run(argv[3]); /* warm up */
		uint64_t begin = now();
		for (long turn = 0; turn < times; turn++)
			kinds[i].run(argv[3]);
		printf("%.1f\n", (double)(now() - begin) / (double)times);
		return 0;
	}
	fputs("usage: walls KIND TIMES [FILE]\n", stderr);
	return 64;
}
