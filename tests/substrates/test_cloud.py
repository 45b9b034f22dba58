"""The substrate ``cloud`` with moto's EC2 server and real sshds: creation, failures, and killed owners."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree import gc, substrates
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract.errors import CleanupError, CreateError, DutyfreeError, Exhausted, Unavailable
from dutyfree.substrates.cloud import Cloud, leftovers, watcher
from dutyfree.substrates.cloud.api import DEADLINE, OWNER, RUN, ApiError, Instance, Place
from dutyfree.substrates.cloud.user_data import cloud_config
from dutyfree.substrates.local.owner import identity
from tests.awaiting import enter, together, until
from tests.cloud_server import CREDENTIALS, CloudServer, Decide, cloud_server
from tests.processes import eventually, speaking_python

CORE = {"cancelled_creation", "leaving_ends_what_runs"}
"""What depends on the instance. All checks are slow tests in ``test_conformance``."""


@pytest.fixture(scope="module", autouse=True)
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudServer]:
    with cloud_server(tmp_path_factory.mktemp("cloud"), MOTO_ENABLE_AMI_VALIDATION="1") as started:
        yield started


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv("DUTYFREE_CACHE", str(path))
        yield path


@pytest.fixture(scope="module")
async def cloud(server: CloudServer, shared_cache: Path) -> AsyncIterator[Cloud]:
    async with dutyfree.open("cloud", **server.options) as opened:
        yield opened
    assert not notes(shared_cache)


@pytest.fixture(autouse=True)
def nothing_is_left(server: CloudServer, cloud: Cloud, cache: Path) -> Iterator[None]:
    """No test leaves an instance, or a note of one. Each has a cache of its own for what it opens itself."""
    yield
    assert eventually(lambda: not server.living()), server.living()
    assert eventually(lambda: not notes(cache)), notes(cache)


def notes(cache: Path) -> list[Path]:
    return list((cache / "cloud").glob("*.json"))


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in CORE], ids=str)
async def test_conformance(cloud: Cloud, check: Check) -> None:
    await check(cloud)


@pytest.mark.parametrize("actions", ["init", "exec"])
async def test_one_sandbox(server: CloudServer, actions: str) -> None:
    async with dutyfree.open("cloud", **server.options, actions=actions, price=0.5) as opened:
        before = int(time.time())
        async with opened.sandbox(labels={"task": "a/b"}) as sandbox:
            await sandbox.write("file", b"content")
            assert (await sandbox.exec("cat file")).stdout == b"content"
            assert [span.name for span in sandbox.spans] == ["create", "start", "ssh", "init", "ready"]
            ends = [span.start + span.seconds for span in sandbox.spans]
            starts = [span.start for span in sandbox.spans]
            assert starts[1:] == pytest.approx(ends[:-1], abs=0.01)
            assert await opened.sandboxes() == [sandbox.id]
            (instance,) = server.living()
            (found,) = [one for one in server.instances() if one["InstanceId"] == instance]
            tags = {tag["Key"]: tag["Value"] for tag in found["Tags"]}
            assert tags["dutyfree-label-task"] == "a/b"
            assert before + 7200 <= int(tags["dutyfree-deadline"]) <= time.time() + 7200
            assert {"dutyfree-owner", "dutyfree-run", "dutyfree-name"} < {*tags}
            attribute = "instanceInitiatedShutdownBehavior"
            ended = server.client().describe_instance_attribute(InstanceId=instance, Attribute=attribute)
            assert ended["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
        assert not server.living()
        assert not await opened.sandboxes()


async def test_facts_name_the_price(cloud: Cloud) -> None:
    facts = await cloud.facts()
    assert float(facts["price_per_hour"]) > 0
    assert facts["price_source"] == "libcloud's list"
    assert (facts["isolation"], facts["host_key"]) == ("a virtual machine", "user-data")


async def test_several_at_once_have_their_own_instances(server: CloudServer, cloud: Cloud) -> None:
    seen: set[str] = set()

    async def use() -> None:
        async with cloud.sandbox() as sandbox:
            seen.add(sandbox.id)
            await until(lambda: len(server.living()) == 3 or len(seen) == 3)

    await together(*[use] * 3)
    assert len(seen) == 3


async def test_credentials_and_keys_are_shown_nowhere(
    server: CloudServer, cloud: Cloud, shared_cache: Path
) -> None:
    shown = [
        repr(cloud),
        repr(cloud._config),
        repr(vars(cloud)),
        *(note.read_text() for note in notes(shared_cache)),
    ]
    async with cloud.sandbox():
        shown += [str(server.instances())]
        shown += [path.read_bytes().replace(b"\0", b" ").decode() for path in command_lines()]
    with server.deciding(lambda action: "refuse" if action == "RunInstances" else None):
        try:
            async with dutyfree.open(
                "cloud", **server.options, create_seconds=0.1, settle_seconds=0
            ) as opened:
                await enter(opened.sandbox())
        except CreateError as error:
            cause = error.__cause__
            shown += [str(error), repr(cause), repr(cause and cause.__cause__)]
    secret = CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
    assert not any(secret in text or "PRIVATE" in text or "UserData" in text for text in shown)


def command_lines() -> Iterator[Path]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"cloud" in path.read_bytes():
                yield path
        except OSError:
            pass


# --- User data --------------------------------------------------------------------------------------------


async def test_another_host_key_is_refused(server: CloudServer, cloud: Cloud, tmp_path: Path) -> None:
    """The key that we gave the instance is the only one that is accepted."""
    wrong = tmp_path / "wrong"
    await anyio.run_process(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(wrong)])
    options = {**server.options, "ssh_config": str(tmp_path / "ssh_config"), "boot_seconds": 1}
    config = (server.root / "ssh_config").read_text().rstrip()
    (tmp_path / "ssh_config").write_text(f"{config} {wrong}\n")
    async with dutyfree.open("cloud", **options) as opened:
        with pytest.raises(CreateError, match=r"ssh does not reach it.*host key"):
            await enter(opened.sandbox())
    async with (
        dutyfree.open("cloud", **options, host_key="accept-new") as opened,
        opened.sandbox() as sandbox,
    ):
        assert (await sandbox.exec("true")).ok


@pytest.mark.parametrize("user", ["root", "worker"])
def test_user_data_ends_the_instance(user: str, tmp_path: Path) -> None:
    """Without systemd too. The names that would really end this machine are programs of the test."""
    config = json.loads(cloud_config(user, "ssh-ed25519 A", None, 1).removeprefix("#cloud-config\n"))
    assert config["disable_root"] == (user != "root")
    assert config["users"][1]["name"] == user
    ((shell, option, script),) = config["bootcmd"]
    for name, text in {"systemd-run": "exit 1", "poweroff": f"echo $@ >{tmp_path}/ended"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    assert subprocess.run([shell, option, script], env={"PATH": path}, check=False).returncode == 0
    assert eventually((tmp_path / "ended").exists)


# --- Requests that fail -------------------------------------------------------------------------------------


def first(count: int, what: str | tuple[int, str], action: str = "RunInstances") -> tuple[Decide, list[str]]:
    """The first requests of an action have this outcome. Also returns all actions."""
    seen: list[str] = []

    def decide(asked: str) -> str | tuple[int, str] | None:
        seen.append(asked)
        return what if asked == action and seen.count(action) <= count else None

    return decide, seen


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("lose", id="answer lost"),
        pytest.param("refuse", id="request lost", marks=pytest.mark.slow),
        pytest.param((503, "RequestLimitExceeded"), id="busy"),
        pytest.param((500, "InternalError"), id="internal error", marks=pytest.mark.slow),
    ],
)
async def test_a_repeated_request_makes_one_instance(
    server: CloudServer, cloud: Cloud, what: str | tuple[int, str]
) -> None:
    decide, seen = first(2, what)
    before = len(server.instances())
    with server.deciding(decide):
        async with cloud.sandbox() as sandbox:
            assert (await sandbox.exec("true")).ok
            assert len(server.living()) == 1
    assert len(server.instances()) == before + 1
    assert seen.count("RunInstances") == (1 if what == "lose" else 3)


@pytest.mark.slow
async def test_an_instance_whose_answer_was_lost_for_ever(server: CloudServer) -> None:
    """The creation fails, and the instance that exists all the same is ended."""
    lost = ("RunInstances", "DescribeInstances")
    begun: list[str] = []

    def decide(action: str) -> str | None:
        begun.append(action)
        return "lose" if action in lost and "RunInstances" in begun and len(begun) < 8 else None

    async with dutyfree.open("cloud", **server.options, create_seconds=0.1) as opened:
        with server.deciding(decide), pytest.raises(CreateError, match="no answer"):
            await enter(opened.sandbox())
        assert eventually(lambda: not server.living())


@pytest.mark.parametrize(
    ("code", "kind", "remedy"),
    [
        ("VcpuLimitExceeded", Exhausted, "raise the limit of the account"),
        ("InsufficientInstanceCapacity", Exhausted, "another size, zone or region"),
        ("UnauthorizedOperation", CreateError, "the permissions that docs/machines.md lists"),
        ("AuthFailure", CreateError, "set the variables"),
        ("InvalidSubnetID.NotFound", CreateError, "subnet="),
        ("Unsupported", Exhausted, "another size"),
    ],
)
async def test_refusals_have_a_cause_and_a_remedy(
    server: CloudServer, cloud: Cloud, code: str, kind: type[DutyfreeError], remedy: str
) -> None:
    decide, seen = first(100, (400, code))
    with server.deciding(decide), pytest.raises(kind, match=code) as raised:
        await enter(cloud.sandbox())
    assert remedy in raised.value.remedy
    assert seen.count("RunInstances") == 1


async def test_no_such_image(server: CloudServer) -> None:
    options = {**server.options, "image": "ami-00000000"}
    async with dutyfree.open("cloud", **options) as opened:
        with pytest.raises(CreateError, match=r"InvalidAMIID.*image="):
            await enter(opened.sandbox())


async def test_what_cannot_be_given_costs_nothing(server: CloudServer, cloud: Cloud) -> None:
    before = len(server.instances())
    for arguments in ({"limits": dutyfree.Limits(memory="1G")}, {"recipe": dutyfree.Recipe(image="debian")}):
        with pytest.raises(CreateError, match="cloud cannot"):
            await enter(cloud.sandbox(**arguments))
    assert len(server.instances()) == before


@pytest.mark.parametrize(
    ("without", "options", "said"),
    [
        ("AWS_ACCESS_KEY_ID", {}, "there are no credentials: AWS_ACCESS_KEY_ID not set"),
        ("", {"image": ""}, "no image is named"),
        ("", {"region": "moon-1"}, "libcloud knows no region 'moon-1'"),
        ("", {"endpoint": "http://127.0.0.1:1"}, "the provider refused: no answer"),
    ],
)
async def test_why_it_is_not_available(
    server: CloudServer, monkeypatch: pytest.MonkeyPatch, without: str, options: dict[str, Any], said: str
) -> None:
    monkeypatch.delenv(without, raising=False)
    found = await substrates.probe("cloud", **{**server.options, **options})
    assert not found.available
    assert said in found.detail
    assert found.remedy
    with pytest.raises(Unavailable, match="cloud: "):
        await enter(dutyfree.open("cloud", **{**server.options, **options}))


async def test_available(server: CloudServer) -> None:
    found = await substrates.probe("cloud", **server.options)
    assert found.available
    assert "costs money" in found.detail


# --- The end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0.02, 1.0])
async def test_a_cancelled_creation(server: CloudServer, cloud: Cloud, moment: float) -> None:
    """Also if the task is cancelled without anyio."""
    task = asyncio.create_task(enter(cloud.sandbox()))
    await anyio.sleep(moment)
    task.cancel()
    await asyncio.wait([task])
    assert not server.living()


async def test_an_instance_that_cannot_be_ended_is_left_to_the_watcher(server: CloudServer) -> None:
    def decide(action: str) -> tuple[int, str] | None:
        return (503, "RequestLimitExceeded") if action == "TerminateInstances" else None

    with pytest.raises(CleanupError, match="was not ended"), server.deciding(decide):
        async with (
            dutyfree.open("cloud", **server.options, end_seconds=0.2) as opened,
            opened.sandbox(),
        ):
            pass
    assert eventually(lambda: not server.living())


PROGRAM = """
    import json, os, sys, anyio, dutyfree

    async def main():
        async with dutyfree.open("cloud", **json.loads(sys.argv[1])) as opened:
            async with opened.sandbox() as sandbox:
                print(opened._watcher._process.pid, opened._directory, flush=True)
                await sandbox.exec("sleep 1000")

    anyio.run(main)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=str)
def test_a_killed_owner_leaves_no_instance(server: CloudServer, number: int) -> None:
    decide, seen = first(2, "refuse", "TerminateInstances")  # the watcher tries again
    with speaking_python(PROGRAM, json.dumps(server.options)) as (process, line):
        _, directory = line.split()
        assert len(server.living()) == 1
        with server.deciding(decide):
            process.send_signal(number)
            process.wait()
            assert eventually(lambda: not server.living())
    assert seen.count("TerminateInstances") >= 3
    assert eventually(lambda: not Path(directory).exists())


async def abandoned(server: CloudServer) -> anyio.Path:
    """An instance whose owner and watcher were killed: the directory with its keys."""

    def killed() -> str:
        with speaking_python(PROGRAM, json.dumps(server.options)) as (process, line):
            pid, directory = line.split()
            os.kill(int(pid), signal.SIGKILL)
            process.kill()
        return directory

    directory = anyio.Path(await anyio.to_thread.run_sync(killed))
    assert len(server.living()) == 1
    assert await directory.exists()
    return directory


async def test_the_next_opening_ends_what_is_left(server: CloudServer, cache: Path) -> None:
    directory = await abandoned(server)
    async with dutyfree.open("cloud", **server.options):
        assert not server.living()
    for note in notes(cache):
        os.utime(note, (0, 0))
    await gc.collect()  # the note of the dead owner, and its keys
    assert not await directory.exists()


async def test_gc_ends_what_is_left(
    server: CloudServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = await abandoned(server)
    mine = lambda found: [one for one in found if one.kind == "cloud instance"]  # noqa: E731
    (told,) = mine(await gc.collect(dry_run=True))
    assert server.living()[0] in told.what
    assert await directory.exists()
    with monkeypatch.context() as patch:
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        (told,) = mine(await gc.collect())
        assert "there are no credentials" in told.failure
    assert not await directory.exists()
    (told,) = mine(await gc.collect())
    assert not told.failure
    assert not server.living()
    assert not mine(await gc.collect())
    for note in notes(cache):
        os.utime(note, (0, 0))  # until now an instance could have appeared late
    await gc.collect()


@pytest.mark.slow
async def test_more_instances_than_a_page(server: CloudServer, cloud: Cloud) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "dutyfree-run", "Value": cloud._run}]}]
    for _ in range(101):
        made = server.client().run_instances(
            ImageId=server.options["image"], MinCount=1, MaxCount=1, TagSpecifications=tags
        )
        server.client().terminate_instances(InstanceIds=[made["Instances"][0]["InstanceId"]])
    async with cloud.sandbox() as sandbox:
        assert await cloud.sandboxes() == [sandbox.id]


async def test_an_instance_past_its_deadline_is_ended_by_others(server: CloudServer) -> None:
    tags = {"dutyfree": "1", "dutyfree-owner": "another/machine/1/1/", "dutyfree-deadline": "1000"}
    listed = [{"Key": name, "Value": value} for name, value in tags.items()]
    server.client().run_instances(
        ImageId=server.options["image"],
        MinCount=1,
        MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": listed}],
    )
    async with dutyfree.open("cloud", **server.options):
        assert not server.living()


class Listing:
    """A provider with these instances. See ``Api``."""

    def __init__(self, *instances: Instance) -> None:
        self._instances = instances

    def find(self, tags: Any) -> tuple[Instance, ...]:
        return self._instances


def running(run: str, owner: str, late: float) -> Instance:
    """An instance whose deadline was so many seconds ago."""
    return Instance(run, "running", {RUN: run, OWNER: owner, DEADLINE: f"{time.time() - late}"})


def test_only_what_certainly_has_no_owner_is_ended(cache: Path) -> None:
    """A clone of this machine has its id and another boot, and the clock of an owner may be late."""
    _, *rest, machine = (identity() or "").split("/")
    owner = "/".join(("another-boot", *rest, machine))
    listing = Listing(
        running("ours", owner, 0), running("of-a-clone", owner, 600), running("late", owner, 7200)
    )
    note = leftovers.write_note(leftovers.Note(Place(), "ours", owner))
    found = [one.id for one in leftovers.abandoned(listing)]  # type: ignore[arg-type]
    note.unlink()
    assert found == (["ours", "late"] if machine else ["late"])


class Late:
    """A provider that lists an instance late, and fails in between. See ``Api``."""

    def __init__(self) -> None:
        self.asked = 0
        self.ended: list[str] = []

    def find(self, tags: Any) -> list[Instance]:
        self.asked += 1
        if self.asked == 2:
            raise ApiError("unclear", "nothing")
        if self.asked < 4:
            return []
        return [Instance("i-1", "ended" if self.ended else "running", {"dutyfree-name": "one"})]

    def end(self, instance: str) -> bool:
        self.ended.append(instance)
        return True


def test_the_watcher_waits_for_an_instance_that_is_listed_late() -> None:
    late = Late()
    assert watcher.end_all(late, "run", ["one"], 60, 60, 0.01)  # type: ignore[arg-type]
    assert late.ended == ["i-1"]


# --- Permissions --------------------------------------------------------------------------------------------


async def test_the_documented_permissions_are_those_of_the_requests(server: CloudServer) -> None:
    page = await anyio.Path(__file__).parents[2].joinpath("docs", "machines.md").read_text()
    policy = json.loads(page.partition("```json\n")[2].partition("```")[0])
    listed = [statement["Action"] for statement in policy["Statement"]]
    allowed = {one for actions in listed for one in ([actions] if isinstance(actions, str) else actions)}
    decide, seen = first(0, "")
    with server.deciding(decide):
        async with dutyfree.open("cloud", **server.options) as opened:
            await opened.facts()
    # The tags of the first request need one more.
    assert {f"ec2:{action}" for action in seen} | {"ec2:CreateTags"} == allowed
