"""What this machine can do for dutyfree: each thing available or not, why, and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

from dutyfree import substrates
from dutyfree.contract import Availability
from dutyfree.doctor import general, native
from dutyfree.doctor.finding import Finding

__all__ = ["Finding", "ailing", "examine"]


async def examine() -> list[Finding]:
    """Look at everything. Raises nothing."""
    findings = general.look()
    seen: dict[str, Availability] = {}
    for name in substrates.names():
        found = seen[name] = await substrates.probe(name)
        if seen.get(name.partition("-")[0]) == found and "-" in name:
            continue  # native at one warmth: what is true of it was said
        findings.append(Finding(f"substrate {name}", found.available, found.detail, found.remedy))
    return findings + await native.look()


def ailing(findings: list[Finding]) -> Iterator[Finding]:
    """What keeps even the study on bare from running."""
    return (finding for finding in findings if finding.needed and not finding.fine)
