"""``dutyfree report``, ``compare`` and ``export``: from records alone, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dutyfree.analysis.export import Format
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import UNKNOWN, duration, percent
from dutyfree.analysis.verdicts import Comparison
from dutyfree.cli import standard
from dutyfree.cli.interrupts import loading
from dutyfree.contract.errors import UsageError
from dutyfree.printable import printable, printable_line
from dutyfree.report.wording import groups, signed


def report(directory: Path, /, *, json: bool = False) -> int:
    """Write figures, tables and report anew from the records in DIRECTORY.

    For example:

        dutyfree report out/paper
        dutyfree report copied/records.jsonl.gz

    Parameters
    ----------
    directory
        What 'dutyfree study --out' named, or a file of records; it may be compressed with gzip, and may
        have been copied from another machine. The report is written beside the records.
    json
        Print the summary as JSON on standard output.
    """
    with loading():
        from dutyfree.report.writing import write
        from dutyfree.study import records

    show(write(directory), records.home(directory), as_json=json)
    return 0


Runs = Annotated[tuple[Path, ...], Parameter(consume_multiple=True)]


def compare(
    *directories: Path,
    before: Runs = (),
    after: Runs = (),
    across_hosts: bool = False,
    json: bool = False,
) -> int:
    """Say what became slower or faster, from runs BEFORE to runs AFTER.

    Two runs of the same thing differ, even back to back: the machine is never the same twice. So a change
    counts when it is larger than the runs of each side differ among themselves, which takes two runs a side
    at the very least; three or more, taken in turn, are better. With one run a side the verdict is
    "cannot tell". To compare two configurations, prefer 'dutyfree ab': it needs fewer trials and shows
    smaller differences. The exit status is 1 when something became slower, or there is nothing to compare.

    For example:

        dutyfree compare --before out/a1 out/a2 out/a3 --after out/b1 out/b2 out/b3
        dutyfree compare out/before out/after
        dutyfree compare --across-hosts out/here out/there
        dutyfree compare out/ab-20261116-120000

    Parameters
    ----------
    directories
        One run before and one after. Or one study of two substrates, such as 'dutyfree ab' makes: the
        second is compared with the first, round by round. Directories, or files of records.
    before
        Earlier runs of one plan, as many as there are.
    after
        Later runs.
    across_hosts
        Compare although the machines differ; the verdicts then speak of the machines too.
    json
        Print JSON on standard output.
    """
    from dutyfree.analysis import ab, comparison
    from dutyfree.study import records

    if directories and (before or after):
        raise UsageError("name runs with --before and --after, or without, not both", remedy=COMPARING)
    if len(directories) == 1:
        return show_comparison(ab.compare_rounds(records.read(directories[0])), as_json=json)
    if directories:
        before, after = directories[:1], directories[1:]
    if not before or not after or (directories and len(directories) > 2):
        raise UsageError("it is not clear which runs to compare with which", remedy=COMPARING)
    earlier, later = ([records.read(path) for path in side] for side in (before, after))
    return show_comparison(comparison.compare(earlier, later, across_hosts=across_hosts), as_json=json)


COMPARING = "such as: dutyfree compare --before out/a1 out/a2 --after out/b1 out/b2"


def show_comparison(found: Comparison, *, as_json: bool) -> int:
    """Print it, and return the exit status: 1 if something is slower, or there is nothing to compare."""
    from dutyfree.analysis import comparison

    if as_json:
        standard.tell(found)
    else:
        _print_markdown(comparison.as_markdown(found))
    return 1 if found.slower or not found.changes else 0


def export(directory: Path, /, *, format: Format = "csv", out: Path | None = None) -> int:  # noqa: A002
    """Write the trials and the actions as flat tables.

    For example:

        dutyfree export out/paper
        dutyfree export --format parquet --out tables out/paper

    Parameters
    ----------
    directory
        What 'dutyfree study --out' named, or a file of records.
    format
        csv or parquet.
    out
        Where to; "export" beside the records by default.
    """
    from dutyfree.analysis.export import export as write
    from dutyfree.study import records

    for path in write(records.read(directory), out or records.home(directory) / "export", format):
        standard.show(str(path))
    return 0


def show(summary: Summary, directory: Path, *, as_json: bool) -> None:
    """The main numbers, and where the report is."""
    if as_json:
        from dutyfree.analysis.summary import encode

        print(encode(summary).decode())  # noqa: T201 (the command's output)
        return
    headings = ("workload", "substrate", "first p50", "whole p50", "whole p95", "tax", "trials")
    rates = {(tax.workload, tax.substrate, tax.parallel): tax.rate for tax in summary.taxes}
    rows = []
    for cell in summary.cells:
        rate = rates.get(cell.key)
        rows.append((*_row(cell), _tax(rate), _trials(cell)))
    standard.table(headings, rows, right=range(2, 7))
    for group in groups(summary.cautions, len(summary.cells)):
        text = printable_line(f"caution, {group.line}")
        print(standard.coloured(text, "yellow"))  # noqa: T201 (the command's output)
    standard.show(f"report: {directory / 'report.html'}")


def _row(cell: Cell) -> tuple[str, str, str, str, str]:
    name = cell.workload if cell.parallel == 1 else f"{cell.workload}, {cell.parallel} at once"
    return (
        name,
        cell.substrate,
        duration(cell.first_result.p50.value) if cell.first_result else UNKNOWN,
        duration(cell.total.p50.value) if cell.total else UNKNOWN,
        duration(cell.total.p95.value) if cell.total else UNKNOWN,
    )


def _tax(rate: Estimate | None) -> str:
    """In words where the interval includes none."""
    if rate is None:
        return UNKNOWN
    return signed(percent(rate.value)) if rate.leaves_out(0) else "none shown"


def _trials(cell: Cell) -> str:
    return f"{cell.trials}, {cell.failed} failed" if cell.failed else str(cell.trials)


def _print_markdown(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal:
        console.print(Markdown(printable(text)))
    else:
        print(printable(text))  # noqa: T201 (the command's output)
