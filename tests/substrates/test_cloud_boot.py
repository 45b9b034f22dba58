"""The user data of ``cloud`` in a virtual machine with Debian's cloud-init: its keys and its deadline."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import pytest

from dutyfree.substrates.cloud.user_data import cloud_config, make_key
from dutyfree.substrates.ssh import Ssh, SshConfig
from tests.cloud_init import booted, image

LIFETIME = 240


@pytest.mark.emulated
@pytest.mark.root("its file system is made as root")
@pytest.mark.timeout(1800)
async def test_an_instance_boots_is_reached_and_ends_itself(tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(image)
    key, host_key = [
        await anyio.to_thread.run_sync(make_key, tmp_path / name) for name in ("key", "host_key")
    ]
    known = tmp_path / "known_hosts"
    known.write_text(f"instance {' '.join(host_key.public.split()[:2])}\n")
    options = ("HostKeyAlias=instance", f"UserKnownHostsFile={known}", "StrictHostKeyChecking=yes")
    with booted(tmp_path, cloud_config("root", key.public, host_key, LIFETIME)) as (machine, port):
        ways: tuple[Literal["init", "exec"], ...] = ("init", "exec")
        for actions in ways:
            config = SshConfig(
                host="root@127.0.0.1",
                port=port,
                identity=str(key.path),
                config="/dev/null",
                options=options,
                actions=actions,
            )
            async with Ssh(config, patience=600) as reached, reached.sandbox() as sandbox:
                await sandbox.write("file", b"content")
                assert (await sandbox.exec("cat file; uname -n")).stdout.startswith(b"content")
        assert machine.poll() is None
        assert await anyio.to_thread.run_sync(machine.wait, 900) == 0
        assert "Power down" in (tmp_path / "console").read_text(errors="replace")
