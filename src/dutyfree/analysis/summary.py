"""Summarise records: everything that a report shows."""

from __future__ import annotations

import msgspec

from dutyfree.analysis import law, model, tails
from dutyfree.analysis.action_path import action_paths
from dutyfree.analysis.baselines import ordered_labels, twins
from dutyfree.analysis.cautions import cautions, incomplete
from dutyfree.analysis.cells import describe, failure_groups, samples
from dutyfree.analysis.control import Floor, noise_floor
from dutyfree.analysis.decomposition import Decomposer, workload_order
from dutyfree.analysis.model import SessionSummary, SubstrateSummary, Summary
from dutyfree.analysis.projection import prices, project, spreads, throughput
from dutyfree.analysis.rounds import Rounds
from dutyfree.analysis.tax import ratios, taxes
from dutyfree.study.records import Records


def summarise(records: Records) -> Summary:
    """Compute the summary of any records: partial, failed, or without a trial."""
    decomposer = Decomposer(records)
    by_key = samples(records, decomposer)
    plan = records.study.plan
    cells = [describe(sample, plan, decomposer) for sample in by_key.values()]
    rounds = Rounds(by_key.values())
    copies = twins(records)
    control = noise_floor(by_key, copies, rounds)
    floor = Floor(control)
    # A twin is the same substrate again. It shows the noise, and is not compared.
    lone_keys = {key: sample for key, sample in by_key.items() if key[1] not in copies}
    lone_cells = [cell for cell in cells if cell.substrate not in copies]
    compared = ratios(lone_keys, rounds, floor)
    found_cautions = cautions(records, cells, by_key, decomposer)
    held_out, open_cells = plan.get("held_out") or (), incomplete(found_cautions)
    drawn_laws = law.laws(lone_keys, decomposer.baselines, rounds, held_out, open_cells)
    found_tails = [found for sample in lone_keys.values() if (found := tails.tail(sample, rounds))]
    parallel = any(cell.parallel > 1 for cell in cells)
    return Summary(
        schema=model.SCHEMA,
        version=records.study.version,
        started=records.study.started,
        plan=plan,
        host=records.study.host,
        sessions=[SessionSummary(session.started, session.load) for session in records.sessions],
        substrates=[
            _substrate(records, label, copies.get(label), decomposer.baselines.get(label))
            for label in ordered_labels(records)
        ],
        workloads=sorted({cell.workload for cell in cells}, key=workload_order),
        baseline=decomposer.baseline,
        trials=sum(cell.trials for cell in cells),
        warmups=sum(cell.warmups for cell in cells),
        failed=sum(cell.failed for cell in cells),
        cells=cells,
        ratios=compared,
        taxes=taxes(lone_keys, decomposer.baselines, rounds, floor),
        projections=project(lone_cells),
        prices=prices(),
        spreads=spreads(lone_cells, by_key, compared, decomposer.baselines, rounds),
        throughput=[row for sample in by_key.values() if (row := throughput(sample))] if parallel else [],
        failures=failure_groups(by_key.values()),
        cautions=[
            *found_cautions,
            *law.cautions(drawn_laws),
            *tails.cautions(found_tails),
        ],
        laws=[one.law for one in drawn_laws],
        action_paths=action_paths(records, drawn_laws),
        tails=found_tails,
        noise_floor=control,
    )


def encode(summary: Summary) -> bytes:
    return msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n"


def decode(data: bytes) -> Summary:
    """Raises msgspec.ValidationError if the data is not a summary."""
    return msgspec.json.decode(data, type=Summary)


def _substrate(
    records: Records, label: str, control_of: str | None, baseline: str | None
) -> SubstrateSummary:
    facts = records.substrates.get(label)
    if facts is None:
        return SubstrateSummary(label, label, {}, 0.0, None, control_of, baseline)
    return SubstrateSummary(
        label, facts.use, facts.facts, facts.prepare_seconds, facts.unavailable, control_of, baseline
    )
