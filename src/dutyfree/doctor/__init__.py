"""What this machine can do for dutyfree: each thing available or not, why, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from dutyfree import substrates
from dutyfree.doctor import general, native
from dutyfree.doctor.finding import Finding

__all__ = ["Finding", "ailing", "examine"]


async def examine() -> list[Finding]:
    """Look at everything. Raises nothing."""
    findings = general.look()
    for name in substrates.names():
        found = await substrates.probe(name)
        findings.append(Finding(f"substrate {name}", found.available, found.detail, found.remedy))
    return findings + await native.look()


def ailing(findings: list[Finding]) -> Iterator[Finding]:
    """What keeps even the study on bare from running."""
    return (finding for finding in findings if finding.needed and not finding.fine)
