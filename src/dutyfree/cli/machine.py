"""``dutyfree substrates`` and ``dutyfree doctor``: what can be used here."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from dutyfree.cli import standard
from dutyfree.cli.running import run


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
    table = Table("substrate", "what it is", "here", "how to enable it", box=None, pad_edge=False)
    details = {row["name"]: row["detail"] for row in rows}
    for row in rows:
        kin = str(row["name"]).partition("-")[0]
        if kin != row["name"] and details.get(kin) == row["detail"]:
            row["detail"] = f"as {kin}"
        mark = "[green]yes[/]" if row["available"] else "[red]no[/]"
        enable = "" if row["available"] else str(row["remedy"])
        table.add_row(str(row["name"]), str(row["summary"]), f"{mark}: {row['detail']}", enable)
    Console().print(table)
    return 0


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
        table = Table("", "what", "found", "remedy", box=None, pad_edge=False)
        for finding in findings:
            bad = "[red]✗[/]" if finding.needed else "[yellow]![/]"
            table.add_row(
                "[green]✓[/]" if finding.fine else bad,
                finding.what,
                finding.detail,
                "" if finding.fine else finding.remedy,
            )
        Console().print(table)
    return 1 if any(ailing(findings)) else 0
