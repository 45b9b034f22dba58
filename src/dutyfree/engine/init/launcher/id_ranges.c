/* Each range is one byte of a file that all launchers of the host lock: a lock goes with its process, so
 * nothing is left to be cleaned up after one that was killed. */
#define _GNU_SOURCE
#include "launcher/id_ranges.h"

#include "launcher/host.h"
#include "sys.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST_ID (1u << 30) /* far from where people, services and other containers have theirs */
#define RANGES 16383u       /* up to 2³¹ */
#define REGISTER "/run/dutyfree-ids"

static int file = -1;
static unsigned next;
static bool taken[RANGES]; /* by ourselves, whom our own locks do not stop */

int id_range_open(void)
{
	struct stat found;

	if (host.rootless)
		return 0;
	/* Where nobody else is likely to be: launchers with a /run of their own know nothing of each other. */
	if (getrandom(&next, sizeof next, 0) != sizeof next)
		return -errno;
	next %= RANGES;
	file = open(REGISTER, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	/* A host that lets nothing be written there has but this likelihood. */
	if (file < 0)
		return errno == EROFS || errno == ENOENT ? 0 : -errno;
	if (fstat(file, &found) < 0)
		return -errno;
	return S_ISREG(found.st_mode) && found.st_uid == 0 ? 0 : -EPERM;
}

static int lock(short kind, unsigned range)
{
	struct flock wanted = {.l_type = kind, .l_whence = SEEK_SET, .l_start = range, .l_len = 1};

	return file >= 0 && fcntl(file, F_OFD_SETLK, &wanted) < 0 ? -errno : 0;
}

int id_range_claim(unsigned *first)
{
	*first = 0; /* without root, all sandboxes have the ids that there are */
	if (host.rootless)
		return 0;
	for (unsigned attempt = 0; attempt < RANGES; attempt++) {
		unsigned range = next++ % RANGES;
		int error = taken[range] ? -EAGAIN : lock(F_WRLCK, range);
		if (error && error != -EAGAIN && error != -EACCES)
			return error;
		if (!error) {
			taken[range] = true;
			*first = FIRST_ID + range * IDS;
			return 0;
		}
	}
	return -EUSERS;
}

void id_range_release(unsigned first)
{
	unsigned range = (first - FIRST_ID) / IDS;

	if (!first)
		return;
	taken[range] = false;
	lock(F_UNLCK, range);
}

static bool makers[IDS]; /* without root: ids of the launcher's own range that have made a namespace */

unsigned id_maker_claim(unsigned first)
{
	static unsigned last;

	for (unsigned attempt = 1; host.rootless && attempt < host.ids; attempt++) {
		last = last % (host.ids - 1) + 1;
		if (!makers[last]) {
			makers[last] = true;
			return last;
		}
	}
	return first;
}

void id_maker_release(unsigned maker)
{
	if (host.rootless)
		makers[maker] = false;
}
