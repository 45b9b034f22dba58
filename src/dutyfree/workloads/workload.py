"""The types of a workload: steps with expected results, and the recipe that they start from."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from dutyfree.contract import Action, Found, Limits, Observation, Recipe, Result, Stage

StepKind = Literal["inspect", "command", "modify", "test"]

PADDING = """
import os, random, sys
chance, left, number = random.Random(0), int(sys.argv[1]), 0
while left > 0:
    directory = f"/opt/padding/{number // 100}"
    os.makedirs(directory, exist_ok=True)
    with open(f"{directory}/{number}", "wb") as file:
        left -= file.write(chance.randbytes(min(left, 1 << 16)))
    number += 1
"""
"""A program that writes so many bytes that cannot be compressed, into files of 64 KiB."""

CONTROLLERS = {"cpus": "cpu", "memory": "memory", "pids": "pids"}
"""Limit → its name in the fact ``enforces`` of a substrate."""


class Expect(msgspec.Struct, frozen=True, omit_defaults=True):
    """The expected result of a step. A trial with another result fails."""

    exit_code: int = 0
    contains: tuple[bytes, ...] = ()
    """Each must appear in stdout, in the content of the file, in the listed names, or in the matches."""

    def problem(self, result: Result) -> str | None:
        """How the result differs from the expected one; None if it does not."""
        if isinstance(result, Observation):
            if result.timed_out:
                return "timed out"
            if result.exit_code != self.exit_code:
                tail = (result.stderr or result.stdout)[-300:].decode(errors="replace").strip()
                return f"exit code {result.exit_code}, expected {self.exit_code}: {tail}"
            text = result.stdout
        elif isinstance(result, bytes):
            text = result
        elif isinstance(result, Found):
            text = b"\n".join(match.path.encode() + b":" + match.text for match in result.matches)
        else:
            text = "\n".join(entry.name for entry in result or ()).encode()
        missing = next((part for part in self.contains if part not in text), None)
        return None if missing is None else f"expected {missing!r} in {text[-300:]!r}"


class Step(msgspec.Struct, frozen=True):
    """One action of a workload, its kind, and its expected result."""

    label: str
    kind: StepKind
    action: Action
    expect: Expect = Expect()


class Workload(msgspec.Struct, frozen=True):
    """What runs in one sandbox, the same on every substrate.

    ``recipe`` is prepared before the measurement starts. The result of ``first`` ends readiness. ``setup`` is
    measured: its stages run before the actions.
    """

    name: str
    """T0, T1, T2, trajectory-N, ..., or the name of a recorded trajectory."""
    first: Step
    recipe: Recipe = Recipe()
    setup: tuple[Stage, ...] = ()
    actions: tuple[Step, ...] = ()
    limits: Limits = Limits()

    def with_setup_in_recipe(self) -> Workload:
        """The same workload for a warm substrate, which runs the missing stages of the recipe itself."""
        recipe = msgspec.structs.replace(self.recipe, stages=(*self.recipe.stages, *self.setup))
        return msgspec.structs.replace(self, recipe=recipe, setup=())

    def offline(self, repository: Path) -> Workload:
        """The same workload with a copy of a bare repository in its working directory, and no network."""
        stage = Stage("files", files={repository.name: repository})
        recipe = msgspec.structs.replace(self.recipe, stages=(*self.recipe.stages, stage))
        limits = msgspec.structs.replace(self.limits, network=None)
        return msgspec.structs.replace(self, recipe=recipe, limits=limits)

    def padded(self, size: int) -> Workload:
        """The same workload on an image with ``size`` more bytes, in files that no action uses."""
        stage = Stage("setup", commands=(("python3", "-c", PADDING, str(size)),))
        recipe = msgspec.structs.replace(self.recipe, stages=(stage, *self.recipe.stages))
        return msgspec.structs.replace(self, recipe=recipe)

    def limited(self, limits: Limits | None, enforced: str | None = None) -> Workload:
        """The same workload under the limits of a plan, less those that a substrate cannot enforce.

        ``enforced`` is the fact ``enforces`` of the substrate; None if it enforces all or refuses.
        """
        given = (
            {}
            if limits is None
            else {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
        )
        for name, controller in CONTROLLERS.items():
            if enforced is not None and controller not in enforced:
                given.pop(name, None)
        return msgspec.structs.replace(self, limits=msgspec.structs.replace(self.limits, **given))
