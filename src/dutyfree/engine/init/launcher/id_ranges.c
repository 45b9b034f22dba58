/* Each range is one byte of a file, and a launcher locks the bytes of its ranges. The kernel drops the locks when the
 * process ends, so there is nothing to clean up after a crash. */
#include "launcher/id_ranges.h"

#include "launcher/host.h"
#include "sys.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define FIRST_ID (1u << 30) /* far above the ids of users, services and other containers */
#define RANGES 16383u       /* up to id 2³¹ */
#define REGISTER "/run/dutyfree-ids"

static int file = -1;
static unsigned next;
static bool taken[RANGES]; /* ranges of this process, which its own locks do not block */

int id_range_open(void)
{
	struct stat found;

	if (host.rootless)
		return 0;
	/* Start at a random range: launchers with separate /run directories do not see each other's locks. */
	if (getrandom(&next, sizeof next, 0) != sizeof next)
		return -errno;
	next %= RANGES;
	file = open(REGISTER, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
	/* On a read-only /run, the random start is all that we have. */
	if (file < 0)
		return errno == EROFS || errno == ENOENT ? 0 : -errno;
	if (fstat(file, &found) < 0)
		return -errno;
	return S_ISREG(found.st_mode) && found.st_uid == 0 ? 0 : -EPERM;
}

static int lock(short kind, unsigned range)
{
	struct flock region = {.l_type = kind, .l_whence = SEEK_SET, .l_start = range, .l_len = 1};

	return file >= 0 && fcntl(file, F_OFD_SETLK, &region) < 0 ? -errno : 0;
}

int id_range_claim(unsigned *first)
{
	*first = 0; /* rootless: all sandboxes use the ids of the launcher */
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

static bool creators[IDS]; /* rootless: ids of the launcher that created a user namespace */

unsigned id_creator_claim(unsigned first)
{
	static unsigned last;

	for (unsigned attempt = 1; host.rootless && attempt < host.ids; attempt++) {
		last = last % (host.ids - 1) + 1;
		if (!creators[last]) {
			creators[last] = true;
			return last;
		}
	}
	return first;
}

void id_creator_release(unsigned creator)
{
	if (host.rootless)
		creators[creator] = false;
}
