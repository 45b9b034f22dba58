"""Templates of the unmodified E2B SDK: built, used, kept over a restart, and apart from other tenants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("e2b", reason="to enable it: make test-integrations")

from e2b import AsyncSandbox, AsyncTemplate, Sandbox, Template, wait_for_file
from e2b.exceptions import BuildException, SandboxException, TemplateException

from dutyfree.server.tokens import Tokens
from tests.serving import ended_by_sigterm, serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture(autouse=True)
def pointed_here(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", url)
    monkeypatch.setenv("E2B_SANDBOX_URL", url)
    monkeypatch.setenv("E2B_API_KEY", "e2b_anything")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A directory with files to copy."""
    (tmp_path / "folder/deeper").mkdir(parents=True)
    (tmp_path / "folder/a.txt").write_text("a")
    (tmp_path / "folder/b.txt").write_text("b")
    (tmp_path / "folder/deeper/c.sh").write_text("echo c")
    (tmp_path / "folder/deeper/link").symlink_to("c.sh")
    (tmp_path / "single").write_text("single")
    return tmp_path


async def _said(template: str, command: str, **options: Any) -> str:
    made = await AsyncSandbox.create(template, timeout=60)
    try:
        return str((await made.commands.run(command, **options)).stdout)
    finally:
        await made.kill()


async def test_all_kinds_of_steps(context: Path) -> None:
    template = (
        AsyncTemplate(file_context_path=str(context))
        .from_base_image()
        .set_workdir("/srv/app")
        .set_envs({"GREETING": 'it\'s "$HOME"', "PATH": "/opt/tools:$PATH"})
        .copy("folder", "copied")
        .copy("folder/*.txt", "texts")
        .copy("single", "/srv/one/renamed", mode=0o600)
        .copy("single", "/srv/two/")
        .run_cmd("mkdir -p /opt/tools && printf '#!/bin/sh\\necho \"tool $GREETING\"' > /opt/tools/tool")
        .run_cmd("chmod 755 /opt/tools/tool && tool > out")
    )
    lines: list[str] = []
    built = await AsyncTemplate.build(
        template, "all-steps", on_build_logs=lambda entry: lines.append(entry.message)
    )
    assert built.name == "all-steps"
    assert any("RUN chmod 755" in line for line in lines)
    command = "pwd; cat out; ls copied texts /srv/two; stat -c %a /srv/one/renamed; cat copied/deeper/link"
    assert (await _said("all-steps", command)).split("\n") == [
        "/srv/app",
        'tool it\'s "/home/user"',
        *("/srv/two:", "single", ""),
        *("copied:", "a.txt", "b.txt", "deeper", ""),
        *("texts:", "a.txt", "b.txt"),
        "600",
        "echo c",
    ]
    # The SDK runs a login shell, and Debian's /etc/profile sets PATH again.
    assert await _said("all-steps", "/opt/tools/tool") == 'tool it\'s "/home/user"\n'


async def test_files_that_did_not_change_are_not_uploaded_again(context: Path) -> None:
    def template() -> Any:
        return AsyncTemplate(file_context_path=str(context)).from_base_image().copy("single", "/single")

    lines: list[str] = []
    await AsyncTemplate.build(template(), "upload", on_build_logs=lambda entry: lines.append(entry.message))
    assert any("Uploaded 'single'" in line for line in lines)
    lines.clear()
    await AsyncTemplate.build(template(), "again", on_build_logs=lambda entry: lines.append(entry.message))
    assert any("already cached" in line for line in lines)
    (context / "single").write_text("changed")
    await AsyncTemplate.build(template(), "again")
    assert await _said("again", "cat /single") == "changed"
    assert await _said("upload", "cat /single") == "single"


async def test_a_step_that_fails_fails_the_build_with_its_output() -> None:
    template = AsyncTemplate().from_base_image().run_cmd("echo fine").run_cmd("echo it broke >&2; exit 3")
    with pytest.raises(BuildException, match="it broke"):
        await AsyncTemplate.build(template, "broken")
    assert await AsyncTemplate.exists("broken")
    assert not await AsyncTemplate.exists("broken:default")
    with pytest.raises(SandboxException, match="not found"):
        await AsyncSandbox.create("broken")


async def test_status_of_a_build_in_the_background() -> None:
    template = AsyncTemplate().from_base_image().run_cmd("exit 4")
    building = await AsyncTemplate.build_in_background(template, "background")
    while True:  # as the SDK itself waits
        status = await AsyncTemplate.get_build_status(building)
        if status.status.value in ("ready", "error"):
            break
    assert status.status.value == "error"
    assert status.reason is not None
    assert status.reason.step == "1"


async def test_one_template_on_another_with_a_user_and_forced_steps() -> None:
    base = AsyncTemplate().from_base_image().run_cmd("cat /proc/sys/kernel/random/uuid > /uuid")
    await AsyncTemplate.build(base, "below")
    above = AsyncTemplate().from_template("below").set_user("nobody").run_cmd("id -un > /tmp/who")
    await AsyncTemplate.build(above.set_workdir("/var/tmp/own"), "above")
    assert await _said("above", "cat /tmp/who; id -un; pwd") == "nobody\nnobody\n/var/tmp/own\n"
    assert await _said("above", "id -un", user="root") == "root\n"
    assert await _said("above", "cat /uuid") == await _said("below", "cat /uuid")
    before = await _said("below", "cat /uuid")
    await AsyncTemplate.build(base, "below", skip_cache=True)
    assert await _said("below", "cat /uuid") != before


async def test_the_start_command_runs_in_every_sandbox() -> None:
    command = "sleep 0.3; echo $$ > /tmp/started; exec sleep 1000"
    template = (
        AsyncTemplate()
        .from_base_image()
        .set_envs({"KEY": "value"})
        .set_start_cmd(command, wait_for_file("/tmp/started"))
    )
    await AsyncTemplate.build(template, "started")
    found = "tr '\\0' ' ' < /proc/$(cat /tmp/started)/cmdline | grep -x 'sleep 1000 '"
    assert await _said("started", f"until {found}; do sleep 0.05; done") == "sleep 1000 \n"
    ending = AsyncTemplate().from_base_image().set_start_cmd("echo here > /tmp/left; exit 1", "sleep 20")
    await AsyncTemplate.build(ending, "ends-at-once")  # does not sleep: there is no memory to keep
    assert await _said("ends-at-once", "until cat /tmp/left 2>/dev/null; do sleep 0.05; done") == "here\n"


async def test_names_tags_and_removal() -> None:
    template = AsyncTemplate().from_base_image().run_cmd("echo 1 > /version")
    await AsyncTemplate.build(template, "tagged:v1", tags=["stable"])
    assert await AsyncTemplate.exists("tagged:v1")
    assert not await AsyncTemplate.exists("tagged:default")
    assigned = await AsyncTemplate.assign_tags("tagged:v1", ["default", "extra"])
    assert assigned.tags == ["default", "extra"]
    newer = AsyncTemplate().from_base_image().run_cmd("echo 2 > /version")
    await AsyncTemplate.build(newer, "tagged")
    assert await _said("tagged", "cat /version") == "2\n"
    assert await _said("tagged:stable", "cat /version") == "1\n"
    await AsyncTemplate.remove_tags("tagged", "extra")
    assert {tag.tag for tag in await AsyncTemplate.get_tags("tagged")} == {"v1", "stable", "default"}
    with pytest.raises(TemplateException, match="not found"):
        await AsyncTemplate.get_tags("never-built")


async def test_limits_of_a_template() -> None:
    await AsyncTemplate.build(AsyncTemplate().from_base_image(), "small", memory_mb=128, cpu_count=1)
    eat = "python3 -c 'x = bytearray(512 << 20)' || echo refused"
    assert "refused" in await _said("small", eat)


def test_templates_survive_a_restart_and_belong_to_their_tenant(tmp_path: Path) -> None:
    with Tokens(tmp_path / "server.sqlite") as tokens:
        ours, theirs = tokens.create("ours"), tokens.create("theirs")
    with serving(tmp_path) as url:
        options: Any = {"api_url": url, "sandbox_url": url, "api_key": ours}
        template = Template().from_base_image().run_cmd("echo kept > /kept").set_workdir("/opt")
        Template.build(template, "kept", **options)
    with serving(tmp_path) as url:
        options = {"api_url": url, "sandbox_url": url, "api_key": ours}
        assert Template.exists("kept", **options)
        with Sandbox.create("kept", **options) as made:
            assert made.commands.run("cat /kept; pwd").stdout == "kept\n/opt\n"
        foreign: Any = {**options, "api_key": theirs}
        assert not Template.exists("kept", **foreign)
        with pytest.raises(SandboxException, match="not found"):
            Sandbox.create("kept", **foreign)


def test_a_sandbox_and_a_snapshot_go_on_with_the_next_server(tmp_path: Path) -> None:
    with ended_by_sigterm(tmp_path) as url:
        options: Any = {"api_url": url, "sandbox_url": url, "api_key": "e2b_anything"}
        Template.build(Template().from_base_image().set_workdir("/opt"), "lasting", **options)
        made = Sandbox.create("lasting", timeout=120, **options)
        made.files.write("file", "kept")
        snapshot = made.create_snapshot(name="lasting-snapshot")
    with serving(tmp_path) as url:
        options = {"api_url": url, "sandbox_url": url, "api_key": "e2b_anything"}
        again = Sandbox.connect(made.sandbox_id, **options)
        assert again.commands.run("pwd; cat file").stdout == "/opt\nkept"
        with Sandbox.create(snapshot.snapshot_id, **options) as copy:
            assert copy.files.read("/opt/file") == "kept"
        again.kill()
    with serving(tmp_path) as url:  # the last one ended all of its sandboxes, and their snapshots
        options = {"api_url": url, "sandbox_url": url, "api_key": "e2b_anything"}
        assert Sandbox.list_snapshots(**options).next_items() == []
