/* A command in a terminal of its own. The terminal's other side goes to the owner, who reads, writes and
 * resizes it: none of that passes through here, so nothing that is done to a terminal can hold us up, and
 * what nobody reads waits in the kernel. When the owner closes it, the kernel hangs the terminal up. */
#define _GNU_SOURCE
#include "pid1/init.h"
#include "sys.h"

#include <fcntl.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

int terminal_open(uint32_t id, char *payload, size_t size)
{
	struct window wanted;
	int unlocked = 0;

	if (size < sizeof wanted)
		return -EPROTO;
	memcpy(&wanted, payload, sizeof wanted);
	const struct winsize window = {.ws_row = wanted.rows, .ws_col = wanted.columns};
	/* Not waiting, whoever holds it: the flag travels with the descriptor. */
	int ours = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (ours < 0)
		return -errno;
	/* The sandbox's name of it may lead anywhere: the other side is had from this one. */
	AUTOCLOSE int theirs = -1;
	if (ioctl(ours, TIOCSPTLCK, &unlocked) == 0 && ioctl(ours, TIOCSWINSZ, &window) == 0)
		theirs = ioctl(ours, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (theirs < 0) {
		int error = -errno;
		close(ours);
		return error;
	}
	outbox_frame_fd(FRAME_STARTED, 0, id, NULL, 0, ours);
	return command_terminal(id, payload + sizeof wanted, size - sizeof wanted, theirs);
}
