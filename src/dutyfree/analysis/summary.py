"""Summarise records: everything that a report shows."""

from __future__ import annotations

import msgspec

from dutyfree.analysis import model
from dutyfree.analysis.cautions import cautions
from dutyfree.analysis.cells import describe, failure_groups, samples, substrate_order
from dutyfree.analysis.decomposition import Decomposer, workload_order
from dutyfree.analysis.model import SessionSummary, SubstrateSummary, Summary
from dutyfree.analysis.projection import prices, project, spreads, throughput
from dutyfree.analysis.tax import ratios, taxes
from dutyfree.study.records import Records


def summarise(records: Records) -> Summary:
    """Compute the summary of any records: partial, failed, or without a trial."""
    decomposer = Decomposer(records)
    by_key = samples(records, decomposer)
    plan = records.study.plan
    cells = [describe(sample, plan, decomposer) for sample in by_key.values()]
    parallel = any(cell.parallel > 1 for cell in cells)
    return Summary(
        schema=model.SCHEMA,
        version=records.study.version,
        started=records.study.started,
        plan=plan,
        host=records.study.host,
        sessions=[SessionSummary(session.started, session.load) for session in records.sessions],
        substrates=[_substrate(records, label) for label in substrate_order(records)],
        workloads=sorted({cell.workload for cell in cells}, key=workload_order),
        baseline=decomposer.baseline,
        trials=sum(cell.trials for cell in cells),
        warmups=sum(cell.warmups for cell in cells),
        failed=sum(cell.failed for cell in cells),
        cells=cells,
        ratios=ratios(by_key),
        taxes=taxes(by_key, decomposer.baseline),
        projections=project(cells),
        prices=prices(),
        spreads=spreads(cells, by_key),
        throughput=[row for sample in by_key.values() if (row := throughput(sample))] if parallel else [],
        failures=failure_groups(by_key.values()),
        cautions=cautions(records, cells, by_key, decomposer.baseline),
    )


def encode(summary: Summary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"


def decode(data: bytes) -> Summary:
    """Raises msgspec.ValidationError if the data is not a summary."""
    return msgspec.json.decode(data, type=Summary)


def _substrate(records: Records, label: str) -> SubstrateSummary:
    facts = records.substrates.get(label)
    if facts is None:
        return SubstrateSummary(label, label, {}, 0.0, None)
    return SubstrateSummary(label, facts.use, facts.facts, facts.prepare_seconds, facts.unavailable)
