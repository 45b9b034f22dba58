"""Check a substrate against the contract. Exit status: 0 nothing failed, 1 a check did, 2 none ran."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import tomllib
from typing import Any

import anyio
import msgspec

import dutyfree
from dutyfree.conformance import CHECKS, Check, Result, judge, select, tally
from dutyfree.errors import DutyfreeError

GRACE = 30.0
"""Seconds for a check that missed its deadline to be cancelled and cleaned up after."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dutyfree.conformance", description=__doc__)
    parser.add_argument("substrate", nargs="?", help="its name in the registry")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", type=_option)
    parser.add_argument("-k", dest="expression", default="", help='e.g. "timeout or (not) files"')
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument(
        "--patience", type=float, default=1, metavar="FACTOR", help="of every deadline, on slow machines"
    )
    parser.add_argument("--list", action="store_true", help="name the checks, run none")
    asked = parser.parse_args(arguments)
    checks = select(asked.expression) if asked.expression else CHECKS
    checks = [msgspec.structs.replace(check, deadline=check.deadline * asked.patience) for check in checks]
    if asked.list:
        for check in checks:
            _say(f"{check.subject:<10} {check.name:<44} {check.promise}")
        return 0
    if asked.substrate is None:
        parser.error("name a substrate")
    if not checks:
        parser.error(f"no check matches {asked.expression!r}")
    try:
        results = anyio.run(_run, asked.substrate, dict(asked.option), checks, asked.json)
    except DutyfreeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return int(any(result.outcome == "failed" for result in results))


async def _run(name: str, options: dict[str, Any], checks: list[Check], as_json: bool) -> list[Result]:
    results: list[Result] = []
    async with dutyfree.open(name, **options) as substrate:
        await substrate.prepare()  # an image may have to be made, which is no part of any check
        for check in checks:
            watch = threading.Timer(check.deadline + GRACE, _give_up, [check.name])
            watch.start()
            try:
                result = await judge(substrate, check)
            finally:
                watch.cancel()
            results.append(result)
            if not as_json:
                reason = f"  {result.reason}" if result.reason else ""
                _say(f"{result.outcome:<8} {result.seconds:7.2f} s  {result.check}{reason}")
    if as_json:
        counts = {
            outcome: sum(result.outcome == outcome for result in results)
            for outcome in ("passed", "failed", "skipped")
        }
        _say(msgspec.json.encode({"substrate": name, **counts, "results": results}).decode())
    else:
        _say(tally(results))
    return results


def _give_up(name: str) -> None:
    """A substrate may refuse to be cancelled; the suite must end all the same."""
    sys.stderr.write(f"{name} neither ended within its deadline nor could be cancelled; giving up\n")
    sys.stderr.flush()
    os._exit(1)


def _option(text: str) -> tuple[str, Any]:
    """``name=value``, the value as in TOML where it is, a bare string otherwise."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
