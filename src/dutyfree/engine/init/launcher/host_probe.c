#include "launcher/host_probe.h"

#include "launcher/host.h"
#include "launcher/layers.h"
#include "launcher/slot.h"
#include "sys.h"

#include <fcntl.h>
#include <linux/mount.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int user_namespace; /* of the slot that the probe uses */

static int try_tmpfs(void)
{
	AUTOCLOSE int mount = mount_new("tmpfs", NULL, MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV);

	return mount < 0 ? mount : mount_attach(mount, "/up");
}

static int try_overlay(void)
{
	static const char *const rootless_options[][2] = {
		{"lowerdir", "/up/l"}, {"upperdir", "/up/u"}, {"workdir", "/up/w"}, {"userxattr", NULL}, {NULL, NULL}};
	static const char *const root_options[][2] = {{"lowerdir", "/up/l"},  {"upperdir", "/up/u"}, {"workdir", "/up/w"},
						 {"metacopy", "on"}, {NULL, NULL}};

	if (mkdir("/up/l", 0755) < 0 || mkdir("/up/u", 0755) < 0 || mkdir("/up/w", 0755) < 0)
		return -errno;
	AUTOCLOSE int mount = mount_new("overlay", host.rootless ? rootless_options : root_options, 0);
	return mount < 0 ? mount : 0;
}

/* overlayfs marks opaque directories with an xattr. */
static int try_xattr(void)
{
	const char *name = host.rootless ? "user.overlay.opaque" : "trusted.overlay.opaque";
	AUTOCLOSE int upper = open("/up/u", O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	return upper < 0 || syscall(SYS_fsetxattr, upper, name, "y", 1, 0) < 0 ? -errno : 0;
}

static int try_idmap(const char *path)
{
	AUTOCLOSE int mount = mount_clone(AT_FDCWD, path, false);

	return mount < 0 ? mount : mount_restrict(mount, 0, user_namespace);
}

static int try_seccomp(void)
{
	uint32_t action = SECCOMP_RET_ERRNO;

	return syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &action) < 0 ? -errno : 0;
}

static struct {
	char *text;
	size_t size;
} answer;

static void add_result(const char *name, int error)
{
	int used = snprintf(answer.text, answer.size, "%s=%d ", name, -error);

	if (used > 0 && (size_t)used < answer.size) {
		answer.text += used;
		answer.size -= (size_t)used;
	}
}

/* In a mount namespace that ends with the child, so nothing remains. */
static int try_mounts(void *layer)
{
	if (unshare(CLONE_NEWNS) < 0)
		return errno;
	int error = try_tmpfs();
	add_result("tmpfs", error);
	add_result("overlay", error ? error : try_overlay());
	add_result("xattr", error ? error : try_xattr());
	add_result("mapped-tmpfs", error ? error : try_idmap("/up"));
	add_result("mapped", try_idmap(layer));
	return 0;
}

void probe_describe(char *text, size_t size)
{
	char path[LAYER_PATH];
	struct slot *slot = slot_create();
	int layer = slot ? layer_add_host("/usr") : -1;

	answer.text = text;
	answer.size = size;
	add_result("slot", slot ? 0 : -errno);
	if (slot) {
		user_namespace = slot->user_namespace;
		layer_path(path, layer > 0 ? (uint32_t)layer : 0);
		int error = run_child(try_mounts, path, -1);
		if (error)
			add_result("mounts", error);
		slot_destroy(slot);
	}
	if (layer > 0)
		layer_remove((uint32_t)layer);
	add_result("seccomp", try_seccomp());
}
