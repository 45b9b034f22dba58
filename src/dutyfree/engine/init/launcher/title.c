#include "launcher/title.h"

#include <stdio.h>
#include <string.h>

const char title_placeholder[] = {[0 ... LABEL_MAX + 14] = ' ', 0};

static char *begin, *spare;
static size_t size;

void title_init(int argc, char **argv)
{
	char *room = argv[argc - 1];

	begin = argv[1];
	spare = room;
	size = (size_t)(room + strlen(room) - begin);
	if (strcmp(room, title_placeholder) == 0)
		memset(room, 0, strlen(room));
}

void title_set_owner(int pid)
{
	if (spare > begin)
		snprintf(spare, sizeof title_placeholder, "owner %d", pid);
}

void title_set(const char *label)
{
	static const char role[] = "sandbox";
	size_t length = strlen(label);

	if (sizeof role + length >= size)
		return;
	memset(begin, 0, size);
	memcpy(begin, role, sizeof role);
	memcpy(begin + sizeof role, label, length);
}
