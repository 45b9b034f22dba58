/* Files with users: a sandbox's /etc/passwd and /etc/group, a host's /etc/subuid and uid_map. The input is a user, the
 * text of the first file and that of the second, each with a NUL at its end. */
#include "pid1/process.c"
#include "launcher/host.c"
#include "jail.h"

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	jail_enter();
	jail_file("passwd", "", 0);
	jail_file("group", "", 0);
	jail_cover("/etc/passwd", "passwd");
	jail_cover("/etc/group", "group");
	return 0;
}

static void look_up_host(const char *user)
{
	char name[256];
	unsigned first = 0;
	bool all;

	user_name((unsigned)strtoul(user, NULL, 10), name, sizeof name);
	require(subid_range("group", name, 1000, &first) < IDS, "an id range is bounded");
	require(mapped_ids("group", &all) <= IDS, "no more ids than exist");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *parts[3] = {"", "", ""};
	size_t sizes[3] = {0}, at = 0;
	struct identity found;

	if (size == 0 || data[size - 1])
		return 0;
	for (int i = 0; i < 3 && at < size; at += sizes[i++] + 1) {
		parts[i] = (const char *)data + at;
		sizes[i] = strlen(parts[i]);
	}
	jail_file("passwd", parts[1], sizes[1]);
	jail_file("group", parts[2], sizes[2]);
	if (find_user(parts[0], &found))
		require(found.user < 65536 && found.group < 65536, "users and groups are ids of the sandbox");
	look_up_host(parts[0]);
	return 0;
}
