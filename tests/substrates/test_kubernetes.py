"""The substrate ``kubernetes`` on a real cluster: both ways of actions, failures, the pool, killed owners."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import yaml

import dutyfree
from dutyfree import Limits, Recipe, recipes, substrates
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract.errors import (
    ActionError,
    CreateError,
    DutyfreeError,
    ExecError,
    SandboxClosed,
    SandboxGone,
    Unavailable,
    verdict,
)
from dutyfree.substrates.kubernetes import registry, status
from dutyfree.substrates.kubernetes.api import Api, ApiError, connect
from dutyfree.substrates.kubernetes.config import KubernetesConfig
from dutyfree.substrates.kubernetes.execution import ExecRequest, Execution, MarkedStream
from dutyfree.substrates.kubernetes.ownership import (
    GROUP,
    OURS,
    ROLE,
    delete,
    listed,
    remove_leftovers,
    withdraw,
)
from dutyfree.substrates.kubernetes.ownership import OWNER as OWNER_LABEL
from dutyfree.substrates.kubernetes.substrate import KubernetesSubstrate
from dutyfree.substrates.kubernetes.watch import PodWatch
from tests.awaiting import enter, together, until, until_not
from tests.processes import speaking_python
from tests.relay import Relay, relay

INIT = ("timeout_kills_the_tree", "stdin_of_ten_megabytes", "tree_round_trip", "streaming")
EXEC = ("exit_codes", "unread_stdin", "leaving_ends_what_runs", "timeout_kills_the_disguised")
"""What depends on the stream. The other checks are slow tests in ``test_conformance``."""


@pytest.fixture(scope="module")
async def cluster() -> AsyncIterator[Api]:
    """The API of the cluster, as the substrate uses it."""
    api = await connect(KubernetesConfig())
    yield api
    await api.close()


@pytest.fixture(scope="module")
async def pods(cluster: Api) -> AsyncIterator[KubernetesSubstrate]:
    async with dutyfree.open("kubernetes") as opened:
        await opened.prepare()
        yield opened


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in INIT], ids=str)
async def test_conformance(pods: KubernetesSubstrate, check: Check) -> None:
    await check(pods)


@pytest.fixture(scope="module")
async def by_exec(cluster: Api) -> AsyncIterator[KubernetesSubstrate]:
    async with dutyfree.open("kubernetes", actions="exec") as opened:
        await opened.prepare()
        yield opened


@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in EXEC], ids=str)
async def test_conformance_by_exec(by_exec: KubernetesSubstrate, check: Check) -> None:
    await check(by_exec)


async def test_a_command_cannot_write_its_own_end(by_exec: KubernetesSubstrate) -> None:
    """It knows the mark of its processes, but not that of its streams."""
    forged = 'for fd in 1 2; do printf "\\n%s 0 0\\n" $DUTYFREE_EXEC >&$fd; done; exit 3'
    async with by_exec.sandbox() as sandbox:
        seen = await sandbox.exec(forged)
        assert seen.exit_code == 3
        assert b" 0 0\n" in seen.stdout


async def test_variables_travel_as_they_are(by_exec: KubernetesSubstrate) -> None:
    given = {"A": "two\nlines\n", "B": 'it\'s "$HOME" \\ `x`', "C": "", "D": "caf\udce9"}
    async with by_exec.sandbox() as sandbox:
        seen = await sandbox.exec(["env", "-0"], env=given)
        got = dict(entry.split(b"=", 1) for entry in seen.stdout.split(b"\0") if entry)
        assert {name: got[name.encode()] for name in given} == {
            name: os.fsencode(value) for name, value in given.items()
        }
        seen = await sandbox.exec("cat", env=given, stdin=b"in\nput")
        assert seen.stdout == b"in\nput"


async def test_a_shell_that_the_agent_broke(by_exec: KubernetesSubstrate) -> None:
    async with by_exec.sandbox() as sandbox:
        assert (await sandbox.exec("mkdir /new && mv /usr/bin/sh /new/old && mkdir /usr/bin/sh")).ok
        seen = await sandbox.exec("true")
        assert (seen.exit_code, seen.started) == (126, False)
        assert b"permission denied" in seen.stderr or b"is a directory" in seen.stderr
        with pytest.raises(ActionError) as caught:
            await sandbox.read("/etc/passwd")
        assert verdict(caught.value) == "task"


# --- Pods -------------------------------------------------------------------------------------------------


async def test_what_a_pod_is(pods: KubernetesSubstrate, cluster: Api) -> None:
    """No token, no restart, a deadline, an owner, limits, and spans from its conditions."""
    limits = Limits(cpus=0.5, memory="128M")
    async with pods.sandbox(limits=limits, labels={"job": "a b", "team": "x"}) as sandbox:
        assert [span.name for span in sandbox.spans] == ["create", "schedule", "initialise", "start", "init"]
        pod = await cluster.request("GET", cluster.path("pods", sandbox.id))
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert container["resources"]["limits"] == {"cpu": "500m", "memory": str(limits.memory)}
        assert (spec["automountServiceAccountToken"], spec["restartPolicy"]) == (False, "Never")
        assert spec["activeDeadlineSeconds"] == KubernetesConfig().lifetime_seconds
        assert [owner["kind"] for owner in pod["metadata"]["ownerReferences"]] == ["Lease"]
        assert pod["metadata"]["labels"]["team"] == "x"
        assert json.loads(pod["metadata"]["annotations"]["dutyfree.labels"]) == {"job": "a b", "team": "x"}
        seen = await sandbox.exec("ls /var/run/secrets; tr '\\0' ' ' </proc/1/cmdline; env")
        assert b"serviceaccount" not in seen.stdout
        assert b"/.dutyfree/init pod" in seen.stdout
        assert b"KUBERNETES_" not in seen.stdout
        assert await pods.sandboxes() == [sandbox.id]
    assert await pods.sandboxes() == []


async def test_stages_become_an_image(pods: KubernetesSubstrate) -> None:
    """Built once, with what they wrote and removed; no pod runs them again."""
    recipe = Recipe(
        env={"GIVEN": "yes"},
        stages=(
            recipes.command("date +%s%N > /workspace/made && rm /etc/issue && mkdir /opt/kept"),
            recipes.command("mv /workspace/made /opt/kept/"),
        ),
    )
    seen = set()
    for _ in range(2):
        async with pods.sandbox(recipe) as sandbox:
            assert "stages" not in {span.name for span in sandbox.spans}
            found = await sandbox.exec(
                "cat /opt/kept/made; ls /workspace; test -e /etc/issue; echo $? $GIVEN"
            )
            seen.add(found.stdout)
    (only,) = seen
    assert only.endswith(b"\n1 yes\n")
    assert (await pods.facts())["recipes"] == "images of the registry"


async def test_stages_run_in_the_pod_of_another_image(cluster: Api) -> None:
    async with dutyfree.open("kubernetes") as known:
        image = (await known.facts())["image"]
    async with (
        dutyfree.open("kubernetes", image=image) as opened,
        opened.sandbox(Recipe(stages=(recipes.command("echo made > /opt/made"),))) as sandbox,
    ):
        assert "stages" in {span.name for span in sandbox.spans}
        assert await sandbox.read("/opt/made") == b"made\n"


async def test_an_image_without_init_gets_it_over_the_stream(cluster: Api) -> None:
    for program in ("stream", "host"):
        async with (
            dutyfree.open("kubernetes", program=program) as opened,
            opened.sandbox(labels={"program": program}) as sandbox,
        ):
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
            await sandbox.write("large", bytes(5 << 20))
            assert len(await sandbox.read("large")) == 5 << 20


@pytest.mark.parametrize("name", ["KILL", "TERM", "SEGV"])
async def test_the_process_that_holds_the_stream_is_killed(pods: KubernetesSubstrate, name: str) -> None:
    """Root in the pod can do that, so it is the agent's doing."""
    kill = f"trap '' {name}; kill -{name} -1; sleep 60" if name != "KILL" else "kill -KILL -1; sleep 60"
    async with pods.sandbox() as sandbox:
        with pytest.raises(SandboxGone, match="killed the process that holds the stream") as caught:
            await sandbox.exec(kill)  # it sleeps, else its answer may come before the end
        assert verdict(caught.value) == "task"


async def test_commands_cannot_reach_init(pods: KubernetesSubstrate) -> None:
    attempts = """
        for fd in 0 1 2 3 4 5 6 7 100; do ( : < /proc/1/fd/$fd ) 2>/dev/null && echo "read $fd"; done
        for limit in AS NOFILE; do
            python3 -c "from resource import *; prlimit(1, RLIMIT_$limit, (1, 1))" 2>/dev/null && echo $limit
        done
        python3 -c "from socket import *; socket(1).connect('\\0dutyfree-init')" 2>/dev/null && echo joined
        kill -KILL 1; kill -STOP 1; kill -TERM 1
        echo end
    """
    async with pods.sandbox() as sandbox:
        seen = await sandbox.exec(attempts)
        assert seen.stdout == b"end\n", seen
        assert (await sandbox.exec("echo still here")).stdout == b"still here\n"


# --- Failures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grace", [0, 1])
@pytest.mark.parametrize("actions", ["init", "exec"])
async def test_a_pod_that_is_deleted_from_outside(cluster: Api, actions: str, grace: int) -> None:
    """Also without a grace time: then the command ends as if it had been killed."""
    failures: list[DutyfreeError] = []

    async def run(sandbox: dutyfree.Sandbox) -> None:
        try:
            await sandbox.exec("sleep 1000")
        except DutyfreeError as error:
            failures.append(error)

    async with (
        dutyfree.open("kubernetes", actions=actions) as opened,
        opened.sandbox() as sandbox,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(run, sandbox)
        await sandbox.exec("true")
        await delete(cluster, "pods", sandbox.id, grace=grace)
    assert isinstance(failures[0], SandboxClosed), failures
    assert verdict(failures[0]) == "infrastructure"
    assert "was deleted" in str(failures[0])


async def test_an_image_that_cannot_be_pulled(pods: KubernetesSubstrate) -> None:
    with pytest.raises(
        CreateError, match=r"the image cannot be pulled: 127\.0\.0\.1:1/no/such.*pull_secrets"
    ):
        await enter(pods.sandbox(Recipe(image="127.0.0.1:1/no/such:image")))


async def test_no_node_is_large_enough(cluster: Api) -> None:
    async with dutyfree.open("kubernetes", create_seconds=3) as opened:
        with pytest.raises(
            CreateError, match=r"no node could take the pod .* Insufficient cpu.*ask for less"
        ):
            await enter(opened.sandbox(limits=Limits(cpus=10_000)))


async def test_a_quota(cluster: Api) -> None:
    namespace = f"dutyfree-quota-{os.getpid()}"
    await cluster.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    try:
        quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        await cluster.request("POST", path, body=quota)

        async def is_counted() -> bool:
            found = await cluster.request("GET", f"{path}/none")
            return bool((found.get("status") or {}).get("hard"))

        await until(is_counted)
        async with dutyfree.open("kubernetes", namespace=namespace) as opened:
            with pytest.raises(CreateError, match=r"exceeded quota.*raise the namespace's quota"):
                await enter(opened.sandbox())
    finally:
        await cluster.request("DELETE", f"/api/v1/namespaces/{namespace}")


@pytest.mark.parametrize("limits", [Limits(pids=10), Limits(disk=1 << 20), Limits(network="off")])
async def test_limits_that_a_pod_cannot_have(pods: KubernetesSubstrate, limits: Limits) -> None:
    with pytest.raises(CreateError, match=r"kubernetes cannot limit|is not known"):
        await enter(pods.sandbox(limits=limits))


async def test_a_network_that_must_be_off_names_the_option_of_the_command_line(
    pods: KubernetesSubstrate,
) -> None:
    with pytest.raises(CreateError, match="--option isolated_network=true"):
        await enter(pods.sandbox(limits=Limits(network="off")))


async def test_a_context_that_the_kubeconfig_does_not_have(tmp_path: Any) -> None:
    contexts = [{"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("one", "two")]
    path = tmp_path / "config"
    path.write_text(json.dumps({"clusters": [], "users": [], "contexts": contexts, "current-context": "one"}))
    with pytest.raises(Unavailable, match=r"has no context 'nope'.*check the option context=.*one, two"):
        await enter(dutyfree.open("kubernetes", kubeconfig=str(path), context="nope"))


async def test_nobody_listens(tmp_path: Any) -> None:
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
                "users": [{"name": "u", "user": {"token": "t"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "c",
            }
        )
    )
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 does not answer"):
        await enter(dutyfree.open("kubernetes", kubeconfig=str(config)))
    found = await substrates.probe("kubernetes", kubeconfig=str(tmp_path / "none"))
    assert not found.available
    assert "there is no kubeconfig" in found.detail
    config.write_text("builder")
    found = await substrates.probe("kubernetes", kubeconfig=str(config))
    assert not found.available
    assert "cannot be used" in found.detail
    assert f"KUBECONFIG={config} kubectl version" in found.remedy


@pytest.mark.slow
async def test_the_rights_of_the_documentation_are_enough(cluster: Api, tmp_path: Path) -> None:
    """A service account with the role of docs/kubernetes.md, and with nothing else."""
    page = (Path(__file__).parents[2] / "docs/kubernetes.md").read_text()
    role = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    namespace, group = f"dutyfree-rights-{os.getpid()}", "rbac.authorization.k8s.io"
    await cluster.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    try:
        accounts, rights = f"/api/v1/namespaces/{namespace}", f"/apis/{group}/v1/namespaces/{namespace}"
        await cluster.request("POST", f"{accounts}/serviceaccounts", body={"metadata": {"name": "user"}})
        await cluster.request("POST", f"{rights}/roles", body=role)
        binding = {
            "metadata": {"name": "user"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": role["metadata"]["name"]},
            "subjects": [{"kind": "ServiceAccount", "name": "user", "namespace": namespace}],
        }
        await cluster.request("POST", f"{rights}/rolebindings", body=binding)
        asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        made = await cluster.request("POST", f"{accounts}/serviceaccounts/user/token", body=asked)
        config = yaml.safe_load(await anyio.Path(cluster.source).read_text())
        config["users"] = [{"name": "user", "user": {"token": made["status"]["token"]}}]
        for context in config["contexts"]:
            context["context"] |= {"user": "user", "namespace": namespace}
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        given: dict[str, Any] = {"kubeconfig": str(tmp_path / "config")}
        given["registry"] = await registry.announced(cluster)
        for options in ({"ready": 1}, {"actions": "exec"}):
            async with dutyfree.open("kubernetes", **given, **options) as opened:
                await opened.prepare()
                async with opened.sandbox() as sandbox:
                    assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
        with pytest.raises(Unavailable, match="forbidden"):
            await enter(dutyfree.open("kubernetes", **given | {"namespace": "kube-system"}))
    finally:
        await cluster.request("DELETE", f"/api/v1/namespaces/{namespace}")


async def test_a_login_that_ended_is_renewed(cluster: Api, tmp_path: Path) -> None:
    """The token of an account that is made again, in a file, as nodes and vendors' programs renew it."""
    name, token = f"dutyfree-login-{os.getpid()}", tmp_path / "token"
    accounts = cluster.path("serviceaccounts")

    async def log_in() -> None:
        await cluster.request("POST", accounts, body={"metadata": {"name": name}})
        asked = {"spec": {"audiences": [], "expirationSeconds": 3600}}
        made = await cluster.request("POST", f"{accounts}/{name}/token", body=asked)
        token.write_text(made["status"]["token"])

    config = yaml.safe_load(await anyio.Path(cluster.source).read_text())
    config["users"] = [{"name": "user", "user": {"tokenFile": str(token)}}]
    for context in config["contexts"]:
        context["context"] |= {"user": "user"}
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    await log_in()
    try:
        api = await connect(KubernetesConfig(kubeconfig=str(tmp_path / "config")))
        try:
            await api.request("GET", "/version")
            former = await api._login()
            await cluster.request("DELETE", f"{accounts}/{name}")
            await log_in()

            async def is_renewed() -> bool:  # the server remembers for some seconds that a token is valid
                await api.request("GET", "/apis")
                return await api._login() != former

            await until(is_renewed)
            token.write_text("nonsense")
            api._settings.api_key = {"BearerToken": "Bearer nonsense too"}
            with pytest.raises(ApiError, match="Unauthorized"):
                await api.request("GET", "/apis")
        finally:
            await api.close()
    finally:
        await cluster.request("DELETE", f"{accounts}/{name}")


async def test_a_lease_that_was_deleted_is_made_again(cluster: Api) -> None:
    async with dutyfree.open("kubernetes", lease_seconds=3) as opened:
        path = cluster.path("leases", opened._lease.name, group=GROUP)
        former = (await cluster.request("GET", path))["metadata"]["uid"]
        await cluster.request("DELETE", path)

        async def is_another() -> bool:
            try:
                return bool((await cluster.request("GET", path))["metadata"]["uid"] != former)
            except ApiError:
                return False

        await until(is_another)
        async with opened.sandbox() as sandbox:
            await anyio.sleep(2)  # the garbage collector looks at owners of new objects at once
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


# --- The pool ---------------------------------------------------------------------------------------------


async def test_one_owner_takes_each_pod_once(cluster: Api) -> None:
    """Of requests at the same time, none tries a pod that another one is taking."""
    async with dutyfree.open("kubernetes", ready=3, pool=f"once-{os.getpid()}") as opened:
        await opened.prepare()
        (label,) = opened._ready._kinds
        ready = {pod["metadata"]["name"] for pod in opened._ready._own(label)}
        kind = opened._ready._kinds[label]
        taken: list[str | None] = []

        async def take() -> None:
            taken.append(await opened._ready.take(kind))

        await together(take, take, take)
        assert set(taken) == ready
        assert ready <= set(opened._pods.watch.pods)


async def test_the_ready_pods_of_a_kind_that_is_not_used_are_removed(
    cluster: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dutyfree.substrates.kubernetes.pool.KINDS", 1)
    async with dutyfree.open("kubernetes", ready=1, pool=f"kinds-{os.getpid()}") as opened:
        await opened.prepare()
        (label,) = opened._ready._kinds
        (unused,) = opened._ready._own(label)
        async with opened.sandbox(limits=Limits(memory="100M")):
            pass

        async def is_gone() -> bool:
            pod = opened._pods.watch.pods.get(unused["metadata"]["name"])
            return pod is None or status.is_removed(pod)

        await until(is_gone)


@pytest.mark.slow
async def test_a_ready_pod_that_would_end_too_soon_is_replaced(cluster: Api) -> None:
    options: dict[str, Any] = {"ready": 1, "pool": f"age-{os.getpid()}", "lifetime_seconds": 40}
    async with dutyfree.open("kubernetes", **options) as opened:
        await opened.prepare()
        (old,) = opened._pods.watch.pods
        await until(lambda: status.age(opened._pods.watch.pods[old]) > 20)
        async with opened.sandbox() as sandbox:
            assert sandbox.id != old
            await until(lambda: old not in opened._pods.watch.pods)
        await opened.settle()
        (label,) = opened._ready._kinds
        (new,) = opened._ready._own(label)
        async with opened.sandbox() as sandbox:
            assert sandbox.id == new["metadata"]["name"]


async def test_a_pod_that_was_taken_is_not_withdrawn(cluster: Api) -> None:
    async with dutyfree.open("kubernetes", ready=1, pool=f"taken-{os.getpid()}") as opened:
        await opened.prepare()
        (label,) = opened._ready._kinds
        (seen,) = opened._ready._own(label)
        async with opened.sandbox() as sandbox:
            assert sandbox.id == seen["metadata"]["name"]
            assert not await withdraw(cluster, seen)
        await until(lambda: len(opened._ready._own(label)) == 1)
        (other,) = opened._ready._own(label)
        assert await withdraw(cluster, other)
        assert not await opened._ready._claim(other["metadata"]["name"])


async def test_owners_share_a_pool_and_never_take_the_same_pod(cluster: Api) -> None:
    """Two owners take twelve pods of one pool at once; all are different, and nothing is left."""
    options: dict[str, Any] = {"ready": 3, "pool": f"test-{os.getpid()}"}
    taken: list[str] = []
    async with (
        dutyfree.open("kubernetes", **options) as one,
        dutyfree.open("kubernetes", **options) as other,
    ):
        for opened in (one, other):
            await opened.prepare()
        released = anyio.Event()

        async def use(opened: KubernetesSubstrate) -> None:
            async with opened.sandbox() as sandbox:
                taken.append(f"{sandbox.id} {sandbox.spans[0].name}")
                if len(taken) == 8:
                    released.set()
                await released.wait()
                assert (await sandbox.exec("hostname")).stdout.decode().strip() == sandbox.id

        with anyio.fail_after(120):
            await together(*[lambda opened=opened: use(opened) for opened in (one, other) * 4])
        assert len({line.split()[0] for line in taken}) == 8, taken
        assert sum(line.endswith(" ready") for line in taken) >= 6, taken
        mine, theirs = one._lease.owner, other._lease.owner
    left = await listed(cluster, f"{OWNER_LABEL} in ({mine}, {theirs})")
    assert all(status.is_removed(pod) for pod in left)


# --- Answers that are lost ----------------------------------------------------------------------------------


@pytest.fixture
async def unsteady(cluster: Api, tmp_path: Path) -> AsyncIterator[tuple[Relay, str]]:
    """A relay in front of the API server, and a kubeconfig that goes through it."""
    config = yaml.safe_load(await anyio.Path(cluster.source).read_text())
    address = urlsplit(cluster.server)
    async with relay(str(address.hostname), int(address.port or 443)) as made:
        for each in config["clusters"]:
            each["cluster"]["server"] = f"https://127.0.0.1:{made.port}"
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        yield made, str(tmp_path / "config")


async def _of_owner(cluster: Api, opened: KubernetesSubstrate) -> dict[str, str]:
    """The pods of an owner that have processes, and their roles."""
    found = await listed(cluster, opened.owner)
    return {
        pod["metadata"]["name"]: pod["metadata"]["labels"][ROLE]
        for pod in found
        if not status.is_removed(pod)
    }


async def test_a_pod_whose_creation_got_no_answer_is_removed(
    cluster: Api, unsteady: tuple[Relay, str]
) -> None:
    between, config = unsteady
    async with dutyfree.open("kubernetes", kubeconfig=config) as opened:
        await opened.prepare()
        between.answers.clear()

        async def cut() -> None:
            await until(lambda: _of_owner(cluster, opened))
            between.cut()

        async def create() -> None:
            with pytest.raises(CreateError, match="does not answer"):
                await enter(opened.sandbox())

        await together(create, cut)
        await until_not(lambda: _of_owner(cluster, opened))


async def test_a_timeout_during_a_creation_leaves_no_pod(cluster: Api, unsteady: tuple[Relay, str]) -> None:
    """``asyncio.timeout`` cancels the task itself, which no shield of anyio stops."""
    between, config = unsteady
    async with dutyfree.open("kubernetes", kubeconfig=config) as opened:
        await opened.prepare()
        between.answers.clear()
        timed_out = anyio.Event()

        async def answer() -> None:
            await until(lambda: _of_owner(cluster, opened))
            await anyio.sleep(1)
            assert not timed_out.is_set()  # it waits to learn what became of its request
            between.pass_on()

        async def create() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await enter(opened.sandbox())
            timed_out.set()

        await together(create, answer)
        await until_not(lambda: _of_owner(cluster, opened))


@pytest.mark.parametrize("arrives", [True, False])
async def test_a_ready_pod_that_may_have_been_taken(
    cluster: Api, unsteady: tuple[Relay, str], arrives: bool
) -> None:
    """No later request gets it. It is removed if it was taken."""
    between, config = unsteady
    options: dict[str, Any] = {"kubeconfig": config, "ready": 1, "pool": f"unclear-{os.getpid()}"}
    async with dutyfree.open("kubernetes", **options) as opened:
        await opened.prepare()
        (name,) = await _of_owner(cluster, opened)
        (between.answers if arrives else between.requests).clear()

        async def cut() -> None:
            if arrives:
                await until(lambda: _is_taken())
            else:
                await anyio.sleep(1)
            between.cut()

        async def _is_taken() -> bool:
            return (await _of_owner(cluster, opened)).get(name) == "sandbox"

        async def take() -> None:
            with pytest.raises(CreateError, match="could not be taken"):
                await enter(opened.sandbox())

        await together(take, cut)
        async with opened.sandbox() as sandbox:
            assert sandbox.id != name
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"
            if arrives:
                await until_not(_is_taken)
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"


# --- The watch --------------------------------------------------------------------------------------------


async def test_the_watch_goes_on_from_a_version_that_is_forgotten(cluster: Api) -> None:
    name = f"dutyfree-watch-{os.getpid()}"
    watch = PodWatch(cluster, f"{OURS}=0,name={name}")
    await watch.start()
    try:
        watch._version = "1"  # compacted, or too old for the server's cache: it lists again
        body = {
            "metadata": {"name": name, "labels": {OURS: "0", "name": name}},
            "spec": {
                "nodeSelector": {"no": "node"},
                "containers": [{"name": "sandbox", "image": "none"}],
            },
        }
        await cluster.request("POST", cluster.path("pods"), body=body)
        with anyio.fail_after(60):
            await watch.until(name, lambda pod: True if pod is not None else None)
            assert await delete(cluster, "pods", name, grace=0)
            await watch.until(name, lambda pod: True if pod is None else None)
    finally:
        await watch.close()


# --- Killed -----------------------------------------------------------------------------------------------

OWNER = """
    import json, sys, anyio, dutyfree

    async def main():
        async with dutyfree.open("kubernetes", **json.loads(sys.argv[1])) as opened:
            await opened.prepare()
            async with opened.sandbox() as sandbox:
                print(sandbox.id, opened._lease.name, flush=True)
                await sandbox.exec("sleep 98764")

    anyio.run(main)
"""


@pytest.mark.parametrize("options", [{}, {"actions": "exec", "ready": 1}], ids=["init", "exec-ready"])
async def test_a_killed_owner_leaves_nothing(cluster: Api, options: dict[str, Any]) -> None:
    options = {**options, "pool": f"killed-{os.getpid()}"}
    with speaking_python(OWNER, json.dumps(options)) as (process, line):
        name, lease = line.split()
        process.kill()
        process.wait()

    async def living() -> list[str]:
        found = await listed(cluster, f"{OWNER_LABEL}={lease.removeprefix('dutyfree-')}")
        return [pod["metadata"]["name"] for pod in found if not status.is_removed(pod)]

    assert name in await living()
    if not options.get("actions"):
        # Nobody has to come back: the stream ended, and with it init.
        async def has_ended() -> bool:
            return status.has_ended(await cluster.request("GET", cluster.path("pods", name)))

        await until(has_ended)
    planned = await remove_leftovers(cluster, dry_run=True)
    assert ("Lease", lease) in planned
    await remove_leftovers(cluster)  # as each opening does
    await until_not(living)
    with pytest.raises(ApiError, match="not found"):
        await cluster.request("GET", cluster.path("leases", lease, group=GROUP))


# --- Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_mark_in_any_pieces(size: int) -> None:
    stream = b"output\nmar mark\n" + b"\nmark 17\n" + b"of a process in the background"
    found = MarkedStream(b"mark", 1000)
    for at in range(0, len(stream), size):
        found.add(stream[at : at + size])
    assert found.word == b"17"
    assert found.value() == (b"output\nmar mark\n", 0)


def pod(state: dict[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    states = [{"name": "sandbox", "state": state}] if state else []
    return {
        "metadata": {"name": "p"},
        "spec": {"nodeName": "n", "containers": [{"image": "x:1.502"}]},
        "status": {"phase": "Running", "containerStatuses": states, **given},
    }


LOST = [{"type": "Ready", "status": "False"}]
DRAINED = [{"type": "DisruptionTarget", "status": "True", "message": "Taint manager: deleting"}]
FULL = "Pod ephemeral local storage usage exceeds the total limit of containers 1Mi. "
ENDINGS = [
    (pod({"running": {}}), type(None), ""),
    (None, SandboxClosed, "was deleted"),
    (pod({"running": {}}, conditions=LOST), ExecError, "the node n of the pod p is lost"),
    (pod({"running": {}}, conditions=DRAINED), ExecError, "the cluster removes the pod p: Taint manager"),
    (pod(phase="Failed", reason="Evicted", message="The node was low on memory."), ExecError, "was evicted"),
    (pod(phase="Failed", reason="Evicted", message=FULL), SandboxGone, "was evicted"),
    (pod(phase="Failed", reason="DeadlineExceeded"), SandboxClosed, "lifetime_seconds"),
    (pod({"terminated": {"reason": "OOMKilled", "exitCode": 137}}), SandboxGone, "its memory limit"),
    (pod({"terminated": {"reason": "OOMKilled", "exitCode": 0}}), ExecError, "ended: OOMKilled, exit code 0"),
    (pod({"terminated": {"reason": "Completed", "exitCode": 0}}), ExecError, "Completed, exit code 0"),
]


@pytest.mark.parametrize(("given", "kind", "said"), ENDINGS)
def test_why_a_pod_ended(given: dict[str, Any] | None, kind: type, said: str) -> None:
    found = status.ending(given, "p")
    assert type(found) is kind
    assert said in str(found)


@pytest.mark.parametrize(
    ("reason", "message", "fails"),
    [
        ("ErrImagePull", "manifest for x:1 not found", True),
        ("ErrImagePull", "x:1.502: not found", True),
        ("ErrImagePull", "pull QPS exceeded", False),
        ("ErrImagePull", "unexpected status code: 429 Too Many Requests", False),
        ("ErrImagePull", "net/http: TLS handshake timeout", False),
        ("ImagePullBackOff", 'Back-off pulling image "x:1"', False),
        ("ImagePullBackOff", 'Back-off pulling image "x:1": ErrImagePull: x:1 not found', True),
        ("CreateContainerError", "failed to reserve container name", False),
        ("CreateContainerError", "no command specified", True),
    ],
)
def test_what_a_node_tries_again(reason: str, message: str, fails: bool) -> None:
    waiting = pod({"waiting": {"reason": reason, "message": message}})
    assert (status.failure(waiting) is not None) == fails


def test_the_word_after_a_mark_is_short() -> None:
    found = MarkedStream(b"mark", 1000)
    for _ in range(100):
        found.add(b"\nmark " + bytes(100))
    assert found.word is not None
    assert len(found.word) == 64


def test_no_variable_is_in_the_command_line() -> None:
    request = ExecRequest(words=("true",), cwd="/", env={"TOKEN": "hidden"}, output=1)
    given: Any = None
    execution = Execution(given, given, "p", request, alone=lambda: True)
    assert not any("hidden" in word for word in execution._command())
