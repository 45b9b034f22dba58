"""``dutyfree report``, ``compare`` and ``export``: they read records only, so they work on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dutyfree.analysis.export import Format
from dutyfree.analysis.findings import Tax
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import UNKNOWN, duration, percent
from dutyfree.analysis.verdicts import Comparison
from dutyfree.cli import console
from dutyfree.cli.signals import loading
from dutyfree.contract.errors import UsageError
from dutyfree.printable import printable, printable_line
from dutyfree.report.phrases import factor, groups, seconds, signed


def report(directory: Path, /, *, json: bool = False) -> int:
    """Write figures, tables and report again from the records in DIRECTORY.

    For example:

        dutyfree report out/paper
        dutyfree report copied/records.jsonl.gz

    Parameters
    ----------
    directory
        The directory of 'dutyfree study --out', or a file of records. The file may be compressed with gzip,
        and may come from another machine. The report is written beside the records.
    json
        Print the summary as JSON on standard output.
    """
    with loading():
        from dutyfree.report import files
        from dutyfree.study import records

    show_summary(files.write(directory), records.home(directory), as_json=json)
    return 0


Runs = Annotated[tuple[Path, ...], Parameter(consume_multiple=True)]


def compare(
    *directories: Path,
    before: Runs = (),
    after: Runs = (),
    across_hosts: bool = False,
    json: bool = False,
) -> int:
    """Say what became slower or faster between the runs BEFORE and the runs AFTER.

    Two runs of the same plan differ, even one after the other, because the machine changes. So a change
    counts only if it is larger than the differences between the runs of one side. This needs at least two
    runs on each side; three or more, taken in turn, are better. With one run on a side the verdict is
    "cannot tell". To compare two configurations, prefer 'dutyfree ab': it needs fewer trials and finds
    smaller differences. The exit status is 1 if something became slower, or if there is nothing to compare.

    For example:

        dutyfree compare --before out/a1 out/a2 out/a3 --after out/b1 out/b2 out/b3
        dutyfree compare out/before out/after
        dutyfree compare --across-hosts out/here out/there
        dutyfree compare out/ab-20261116-120000

    Parameters
    ----------
    directories
        One run before and one run after; or one study of two substrates, such as 'dutyfree ab' makes: it is
        compared round by round, the second substrate with the first. Directories, or files of records.
    before
        The earlier runs of the plan.
    after
        The later runs of the plan.
    across_hosts
        Compare although the machines differ. The verdicts then include the difference between the machines.
    json
        Print JSON on standard output.
    """
    from dutyfree.analysis import ab, comparison
    from dutyfree.study import records

    if directories and (before or after):
        raise UsageError(
            "name the runs either with --before and --after, or without options, not both",
            remedy=COMPARE_EXAMPLE,
        )
    if len(directories) == 1:
        return show_comparison(ab.compare_rounds(records.read(directories[0])), as_json=json)
    if directories:
        before, after = directories[:1], directories[1:]
    if not before or not after or (directories and len(directories) > 2):
        raise UsageError("it is not clear which runs to compare", remedy=COMPARE_EXAMPLE)
    earlier, later = ([records.read(path) for path in side] for side in (before, after))
    return show_comparison(comparison.compare(earlier, later, across_hosts=across_hosts), as_json=json)


COMPARE_EXAMPLE = "such as: dutyfree compare --before out/a1 out/a2 --after out/b1 out/b2"


def show_comparison(found: Comparison, *, as_json: bool) -> int:
    """Print the comparison. Return 1 if something is slower or there is nothing to compare, otherwise 0."""
    from dutyfree.analysis import comparison

    if as_json:
        console.print_json(found)
    else:
        _print_markdown(comparison.as_markdown(found))
    return 1 if found.slower or not found.changes else 0


def export(directory: Path, /, *, format: Format = "csv", out: Path | None = None) -> int:  # noqa: A002
    """Write the trials and the actions as tables, one row each.

    For example:

        dutyfree export out/paper
        dutyfree export --format parquet --out tables out/paper

    Parameters
    ----------
    directory
        The directory of 'dutyfree study --out', or a file of records.
    format
        csv or parquet.
    out
        The directory to write to. Default: "export" beside the records.
    """
    from dutyfree.analysis.export import export as write
    from dutyfree.study import records

    for path in write(records.read(directory), out or records.home(directory) / "export", format):
        console.show(str(path))
    return 0


LAW = ("T = a + b·n + c·w", "a, per rollout", "b, per action", "c, times the work")


def show_summary(summary: Summary, directory: Path, *, as_json: bool) -> None:
    """Print the main numbers, the cautions, and the path of the report."""
    if as_json:
        from dutyfree.analysis.summary import encode

        print(encode(summary).decode())  # noqa: T201 (command-line output)
        return
    headings = ("workload", "substrate", "first command p50", "rollout p50", "rollout p95", "tax", "trials")
    taxes = {(tax.workload, tax.substrate, tax.parallel): tax for tax in summary.taxes}
    rows = [(*_row(cell), _tax(taxes.get(cell.key)), _trials(cell)) for cell in summary.cells]
    console.table(headings, rows, right=range(2, 7))
    if summary.laws:
        laws = [(law.substrate, seconds(law.a), seconds(law.b), factor(law.c)) for law in summary.laws]
        console.table(LAW, laws, right=range(1, 4))
    for group in groups(summary.cautions, len(summary.cells)):
        text = printable_line(f"caution: {group.line}")
        print(console.coloured(text, "yellow"))  # noqa: T201 (command-line output)
    console.show(f"report: {directory / 'report.html'}")


def _row(cell: Cell) -> tuple[str, str, str, str, str]:
    name = cell.workload if cell.parallel == 1 else f"{cell.workload}, {cell.parallel} at once"
    return (
        name,
        cell.substrate,
        duration(cell.first_result.p50.value) if cell.first_result else UNKNOWN,
        duration(cell.total.p50.value) if cell.total else UNKNOWN,
        duration(cell.total.p95.value) if cell.total else UNKNOWN,
    )


def _tax(tax: Tax | None) -> str:
    """The tax rate, or that none is shown."""
    if tax is None or tax.rate is None:
        return UNKNOWN
    return signed(percent(tax.rate.value)) if tax.shown else tax.why or "none shown"


def _trials(cell: Cell) -> str:
    return f"{cell.trials}, {cell.failed} failed" if cell.failed else str(cell.trials)


def _print_markdown(text: str) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    terminal = Console()
    if terminal.is_terminal:
        terminal.print(Markdown(printable(text)))
    else:
        print(printable(text))  # noqa: T201 (command-line output)
