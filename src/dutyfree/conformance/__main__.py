"""Check a substrate against the contract (docs/substrates.md).

Each check is one promise. It passes, fails with a reason, or is not offered, if the substrate does not have
the ability. A check that hangs is stopped at its deadline and fails; the others go on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from dutyfree.conformance import CHECKS, Check, CheckResult, named, select, tally
from dutyfree.conformance.suite import Outcome
from dutyfree.conformance.supervision import NotOpened, supervised
from dutyfree.contract.errors import UsageError

PROGRAM = "python -m dutyfree.conformance"

EXAMPLES = f"""
examples:
  {PROGRAM} bare                                       all checks
  {PROGRAM} my_package:MySubstrate --option size=2     a class of yours, before it has a name
  {PROGRAM} bare --only timeout_kills_the_tree         one check
  {PROGRAM} bare --only files --only trees             all of two subjects
  {PROGRAM} bare --leave-out hundred_megabytes         all except one
  {PROGRAM} bare -k "timeout and not flood"            by words, as pytest's -k
  {PROGRAM} --list                                     the checks, and what each promises

exit status: 0 nothing failed, 1 a check did, 2 none could be run, 130 interrupted
"""


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(arguments)
    try:
        checks = _chosen(asked)
    except UsageError as error:
        parser.error(str(error))
    if asked.list:
        for check in checks:
            _say(f"{check.subject:<11} {check.name:<44} {check.promise}")
        return 0
    if asked.substrate is None:
        parser.error("name a substrate, such as bare; --help has examples")
    if not checks:
        parser.error("no check is left to run; --list names them all")
    results: list[CheckResult] = []
    try:
        for result in supervised(asked.substrate, dict(asked.option), checks, asked.patience):
            results.append(result)
            if not asked.json:
                _say(_line(result))
    except (NotOpened, KeyboardInterrupt) as error:
        if isinstance(error, NotOpened):
            sys.stderr.write(f"{error}\n")
        if results and not asked.json:
            _say(f"{tally(results, len(CHECKS) - len(checks))}, {len(checks) - len(results)} not run")
        return 2 if isinstance(error, NotOpened) else 130
    _close(asked, results, len(CHECKS) - len(checks))
    return int(any(result.outcome == "failed" for result in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("substrate", nargs="?", help="its name, or module:Class")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=option,
        help="an option of the substrate, the value as in TOML; may be given again",
    )
    for choice, what in (("--only", "run this check, or this subject"), ("--leave-out", "run all but it")):
        parser.add_argument(
            choice, action="append", default=[], metavar="CHECK", help=f"{what}; may be given again"
        )
    parser.add_argument("-k", dest="expression", default="", metavar="WORDS", help="run those that match")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    parser.add_argument(
        "--patience",
        type=_factor,
        default=1.0,
        metavar="FACTOR",
        help="multiply every deadline, for slow machines",
    )
    parser.add_argument("--list", action="store_true", help="name the checks, run none")
    return parser


def _chosen(asked: argparse.Namespace) -> list[Check]:
    """Raises UsageError for a check that does not exist."""
    only = named(asked.only) or {check.name for check in CHECKS}
    wanted = only - named(asked.leave_out)
    return [check for check in select(asked.expression) if check.name in wanted]


def _line(result: CheckResult) -> str:
    reason = f"  {result.reason}" if result.reason else ""
    return f"{result.outcome:<11} {result.seconds:7.2f} s  {result.check}{reason}"


def _close(asked: argparse.Namespace, results: Sequence[CheckResult], left_out: int) -> None:
    failed = [result.check for result in results if result.outcome == "failed"]
    if asked.json:
        counts = {
            outcome.replace(" ", "_"): sum(result.outcome == outcome for result in results)
            for outcome in get_args(Outcome)
        }
        found = {"substrate": asked.substrate, **counts, "left_out": left_out, "results": results}
        _say(msgspec.json.encode(found).decode())
        return
    _say(tally(results, left_out))
    if failed:
        _say(f"(--only {failed[0]} runs one of them again, --leave-out {failed[0]} all but that)")


def option(text: str) -> tuple[str, Any]:
    """Read ``name=value``, the value as in TOML where it is, a bare string otherwise."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 0 < factor < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return factor


def _say(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python complains as it ends
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
