"""``dutyfree substrates`` and ``dutyfree doctor``: what this machine can run, and what is missing."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dutyfree.cli import console
from dutyfree.cli.signals import run_async
from dutyfree.printable import printable_line


def substrates(*, json: bool = False) -> int:
    """List the substrates: available on this machine, or why not and what to do.

    For example:

        dutyfree substrates
        dutyfree substrates --json

    Parameters
    ----------
    json
        Print JSON on standard output.
    """
    from dutyfree import substrates as registry

    async def probe() -> list[dict[str, object]]:
        rows = []
        for name in registry.names():
            found = await registry.probe(name)
            summary = registry.provider(name).summary
            rows.append({"name": name, "summary": summary, **msgspec.to_builtins(found)})
        return rows

    rows = run_async(probe)
    if json:
        console.print_json(rows)
        return 0
    _show_findings(
        (
            "✓" if row["available"] else "✗",
            "green" if row["available"] else "red",
            str(row["name"]),
            f"{row['summary']} ({row['detail']})",
            "" if row["available"] else str(row["remedy"]),
        )
        for row in _without_repeated_details(rows)
    )
    return 0


def _without_repeated_details(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Replace the detail of native-warm and its like by "see native" where it is the same."""
    details = {row["name"]: row["detail"] for row in rows}
    bases = [str(row["name"]).partition("-")[0] for row in rows]
    return [
        {**row, "detail": f"see {base}"}
        if base != row["name"] and details.get(base) == row["detail"]
        else row
        for base, row in zip(bases, rows, strict=True)
    ]


def _show_findings(findings: Iterable[tuple[str, console.Colour, str, str, str]]) -> None:
    """Print a mark, the subject and the finding, and the remedy on a line of its own."""
    found = list(findings)
    width = max(len(what) for _, _, what, _, _ in found)
    for mark, colour, what, detail, remedy in found:
        text = printable_line(f"{what:<{width}}  {detail}").rstrip()
        print(f"{console.coloured(mark, colour)} {text}")  # noqa: T201 (command-line output)
        if remedy:
            console.show(f"  → {remedy}")


def doctor(*, json: bool = False) -> int:
    """Check this machine, and say what is missing, why, and what to do.

    The exit status is 1 if something is missing that every study needs, even on bare.

    For example:

        dutyfree doctor
        dutyfree doctor --json

    Parameters
    ----------
    json
        Print JSON on standard output.
    """
    from dutyfree.doctor.check import blocking, check_all

    findings = run_async(check_all)
    if json:
        console.print_json(findings)
    else:
        _show_findings(
            (
                "✓" if finding.fine else "✗" if finding.needed else "!",
                "green" if finding.fine else "red" if finding.needed else "yellow",
                finding.what,
                finding.detail,
                "" if finding.fine else finding.remedy,
            )
            for finding in findings
        )
    return 1 if any(blocking(findings)) else 0
