"""``dutyfree substrates`` and ``dutyfree doctor``: what can be used here."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dutyfree.cli import standard
from dutyfree.cli.running import run
from dutyfree.printable import printable_line


def substrates(*, json: bool = False) -> int:
    """List the substrates: available here, or why not and how to enable them.

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

    rows = run(probe)
    if json:
        standard.tell(rows)
        return 0
    _show(
        (
            "✓" if row["available"] else "✗",
            "green" if row["available"] else "red",
            str(row["name"]),
            f"{row['summary']} ({row['detail']})",
            "" if row["available"] else str(row["remedy"]),
        )
        for row in _shortened(rows)
    )
    return 0


def _shortened(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """What is true of native at one warmth is true of the others, too: it is said once."""
    details = {row["name"]: row["detail"] for row in rows}
    kin = [str(row["name"]).partition("-")[0] for row in rows]
    return [
        {**row, "detail": f"as {of}"} if of != row["name"] and details.get(of) == row["detail"] else row
        for of, row in zip(kin, rows, strict=True)
    ]


def _show(findings: Iterable[tuple[str, standard.Colour, str, str, str]]) -> None:
    """A mark, what was looked at, what was found; and below it, whole and alone on its line, the remedy."""
    found = list(findings)
    width = max(len(what) for _, _, what, _, _ in found)
    for mark, colour, what, detail, remedy in found:
        said = printable_line(f"{what:<{width}}  {detail}").rstrip()
        print(f"{standard.coloured(mark, colour)} {said}")  # noqa: T201 (the command's output)
        if remedy:
            standard.show(f"  → {remedy}")


def doctor(*, json: bool = False) -> int:
    """Look at what this machine offers, and say what is missing, why, and what to do.

    The exit status is 1 when something is missing that even the study on bare needs.

    For example:

        dutyfree doctor
        dutyfree doctor --json

    Parameters
    ----------
    json
        Print JSON on standard output.
    """
    from dutyfree.doctor import ailing, examine

    findings = run(examine)
    if json:
        standard.tell(findings)
    else:
        _show(
            (
                "✓" if finding.fine else "✗" if finding.needed else "!",
                "green" if finding.fine else "red" if finding.needed else "yellow",
                finding.what,
                finding.detail,
                "" if finding.fine else finding.remedy,
            )
            for finding in findings
        )
    return 1 if any(ailing(findings)) else 0
