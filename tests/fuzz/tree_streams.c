/* Tree streams: unpack the input, pack the result, and unpack that again. */
#include "jail.h"
#include "pid1/init.h"

#include <unistd.h>

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	jail_enter();
	return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int input = jail_memory(data, size), output = jail_memory("", 0);

	tree_unpack("one/tree", input);
	if (tree_pack("one/tree", output) == 0) {
		lseek(output, 0, SEEK_SET);
		require(tree_unpack("two/tree", output) == 0, "a packed tree can be unpacked");
	}
	close(input);
	close(output);
	jail_empty();
	return 0;
}
