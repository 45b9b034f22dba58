"""Check what this machine offers to dutyfree: what works, what is missing, and the remedy.

``general`` checks what the study needs, ``native`` what the native engine needs. This room imports the
registry, the engine and the study.
"""

from __future__ import annotations

from collections.abc import Iterator

from dutyfree import substrates
from dutyfree.contract import Availability
from dutyfree.doctor import general, native
from dutyfree.doctor.finding import Finding

__all__ = ["Finding", "blocking", "check_all"]


async def check_all() -> list[Finding]:
    """Check everything. Raises nothing."""
    findings = general.check()
    seen: dict[str, Availability] = {}
    for name in substrates.names():
        found = seen[name] = await substrates.probe(name)
        if seen.get(name.partition("-")[0]) == found and "-" in name:
            continue  # native at a fixed warmth: already checked as native
        findings.append(Finding(f"substrate {name}", found.available, found.detail, found.remedy))
    return findings + await native.check()


def blocking(findings: list[Finding]) -> Iterator[Finding]:
    """The findings that prevent even a study on bare."""
    return (finding for finding in findings if finding.needed and not finding.fine)
