"""``dutyfree report``, ``compare`` and ``export``: from records alone, on any machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from dutyfree.analysis.export import Format
from dutyfree.analysis.model import CautionKind, Cell, Summary
from dutyfree.analysis.units import UNKNOWN, duration, percent
from dutyfree.cli.interrupts import loading
from dutyfree.report.wording import Note, notes


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


def compare(
    before: Path,
    after: Path,
    /,
    *,
    across_hosts: bool = False,
    json: bool = False,
) -> int:
    """Say what became slower or faster from the study in BEFORE to the one in AFTER.

    A change counts when its interval leaves out "no change" and a Mann-Whitney test, corrected for
    the number of comparisons, agrees. The exit status is 1 when something became slower.

    For example:

        dutyfree compare out/before out/after
        dutyfree compare --across-hosts out/here out/there

    Parameters
    ----------
    before
        Directory of the earlier study, or its file of records.
    after
        Directory of the later study, or its file of records.
    across_hosts
        Compare although the machines differ; the verdicts then speak of the machines too.
    json
        Print JSON on standard output.
    """
    import msgspec

    from dutyfree.analysis import comparison
    from dutyfree.study import records

    found = comparison.compare(records.read(before), records.read(after), across_hosts=across_hosts)
    if json:
        Console().print_json(msgspec.json.encode(found).decode())
    else:
        _print_markdown(comparison.as_markdown(found))
    return 1 if found.slower else 0


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
        print(path)  # noqa: T201 (the command's output)
    return 0


def show(summary: Summary, directory: Path, *, as_json: bool) -> None:
    """The main numbers, and where the report is."""
    if as_json:
        from dutyfree.analysis.summary import encode

        print(encode(summary).decode())  # noqa: T201 (the command's output)
        return
    console = Console()
    headings = ("workload", "substrate", "first p50", "whole p50", "whole p95", "tax", "trials")
    table = Table(*headings, box=None, padding=(0, 1, 0, 0), pad_edge=False)  # within 80 columns
    for column in table.columns[2:]:
        column.justify = "right"
    rates = {(tax.workload, tax.substrate, tax.parallel): tax.rate for tax in summary.taxes}
    for cell in summary.cells:
        rate = rates.get(cell.key)
        table.add_row(*_row(cell), percent(rate.value) if rate else UNKNOWN, _trials(cell))
    console.print(table)
    for alike in _by_kind(notes(summary.cautions)):
        first, more = alike[0], len(alike) - 1
        where = f" ({first.about})" if first.cells else ""
        others = f"; {more} more of the kind in the report" if more else ""
        text = f"caution, {first.kind}: {first.text}{where}{others}"
        console.print(text, style="yellow", highlight=False, markup=False)
    print(f"report: {directory / 'report.html'}")  # noqa: T201 (whole, for copying)


def _by_kind(found: Iterable[Note]) -> Iterable[list[Note]]:
    """Of a large study there are dozens: a line for each kind is what a terminal has room for."""
    kinds: dict[CautionKind, list[Note]] = {}
    for note in found:
        kinds.setdefault(note.kind, []).append(note)
    return kinds.values()


def _row(cell: Cell) -> tuple[str, str, str, str, str]:
    name = cell.workload if cell.parallel == 1 else f"{cell.workload}, {cell.parallel} at once"
    return (
        name,
        cell.substrate,
        duration(cell.first_result.p50.value) if cell.first_result else UNKNOWN,
        duration(cell.total.p50.value) if cell.total else UNKNOWN,
        duration(cell.total.p95.value) if cell.total else UNKNOWN,
    )


def _trials(cell: Cell) -> str:
    return f"{cell.trials}, {cell.failed} failed" if cell.failed else str(cell.trials)


def _print_markdown(text: str) -> None:
    console = Console()
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)  # noqa: T201 (the command's output)
