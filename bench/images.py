"""Pull an image into the store of the native engine, compared with ``docker pull`` of the same image.

Both pull from the same registry on the loopback, in turns: with empty stores, and again with the image in
the store. The native engine does it with the command, and in a running process, as Docker's engine does it.
Prints medians, the ratios to Docker's time in the same round, and the load of the machine.

Needs docker-registry, and a Docker engine that has the image (default: the image of the study). The
registry, the copies of the image and the store are removed afterwards.

    scripts/with-docker .venv/bin/python bench/images.py [IMAGE] [--rounds 5]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dutyfree.engine.images.pull import Puller
from dutyfree.engine.images.reference import parse
from dutyfree.engine.store.store import Store

LAYERS = 12
"""Layers of the second image: the layer of the first, and small ones on top."""


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def registry(root: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = root / "config.yml"
    storage = f"storage: {{filesystem: {{rootdirectory: {root}/data}}}}"
    config.write_text(f"version: 0.1\nlog: {{level: error}}\n{storage}\nhttp: {{addr: '{address}'}}\n")
    program = ["docker-registry", "serve", str(config)]
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        host, _, port = address.partition(":")
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.02)
        yield address
    finally:
        process.kill()
        process.wait()


def push(image: str, address: str, context: Path) -> list[str]:
    """Push the flattened image, and one with small layers on top; they share no layer with other images."""
    one, many = f"{address}/bench/one", f"{address}/bench/many"
    container = docker("create", image, "true")
    try:
        exported = subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE)
        subprocess.run(["docker", "import", "-", one], stdin=exported.stdout, check=True, capture_output=True)
        exported.wait()
    finally:
        docker("rm", container)
    lines = [f"FROM {one}"]
    for number in range(LAYERS - 1):
        (context / str(number)).write_bytes(os.urandom(1 << 20))
        lines.append(f"COPY {number} /bench/{number}")
    (context / "Dockerfile").write_text("\n".join(lines))
    subprocess.run(
        ["docker", "build", "--quiet", "--tag", many, str(context)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "DOCKER_BUILDKIT": "0"},
    )
    for name in (one, many):
        docker("push", "--quiet", name)
    return [one, many]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(name: str, rounds: int, cache: Path) -> dict[str, list[float]]:
    environment = dict(os.environ)
    command = [sys.executable, "-m", "dutyfree", "image", "pull", "--quiet", name]

    def pull() -> None:
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)

    found: dict[str, list[float]] = {"docker": [], "native": [], "docker again": [], "native again": []}
    found["native again, in a process"] = []
    for number in range(rounds):
        docker("image", "rm", "--force", name)
        found["docker"].append(seconds(lambda: docker("pull", "--quiet", name)))
        found["docker again"].append(seconds(lambda: docker("pull", "--quiet", name)))
        # A new one each time: on some file systems files are made slowly where many were just removed.
        store = cache / f"{name.rpartition('/')[2]}-{number}"
        environment["DUTYFREE_CACHE"] = str(store)
        found["native"].append(seconds(pull))
        found["native again"].append(seconds(pull))
        puller = Puller(Store(store / "layers"))
        found["native again, in a process"].append(seconds(lambda: puller.pull(parse(name)).close()))  # noqa: B023
    return found


def show(kind: str, found: dict[str, list[float]]) -> None:
    for what, times in found.items():
        beside = found["docker again" if "again" in what else "docker"]
        ratio = statistics.median(own / theirs for own, theirs in zip(times, beside, strict=True))
        middle = statistics.median(times)
        print(f"{kind:5} {what:27} {middle:7.3f} s  x{ratio:5.2f}  n={len(times)}", flush=True)
    print(f"      load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", nargs="?", default="dutyfree/study:latest")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, registry(Path(scratch)) as address:
        context = Path(scratch, "context")
        context.mkdir()
        names = push(arguments.image, address, context)
        try:
            for name in reversed(names):  # the one with more layers first: it holds the other's
                docker("image", "rm", "--force", name)
            for name in names:
                found = measure(name, arguments.rounds, Path(scratch, "cache"))
                show(name.rpartition("/")[2], found)
                docker("image", "rm", "--force", name)
        finally:
            for name in names:
                subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, check=False)


if __name__ == "__main__":
    main()
