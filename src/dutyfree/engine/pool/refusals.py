"""From the scheduler's reason for a refusal to the exception that the caller gets."""

from __future__ import annotations

import msgspec

from dutyfree.contract.errors import CreateError, Exhausted, PoolError, Quarantined, StageError
from dutyfree.engine.pool.scheduler.values import JobFailure, Quarantine, Shortage


def refusal(reason: Shortage | Quarantine | JobFailure) -> PoolError | CreateError:
    """The exception for a refused request."""
    match reason:
        case Shortage():
            return _exhausted(reason)
        case Quarantine():
            last = reason.failure
            return Quarantined(
                f"stage {reason.stage!r} failed {reason.failures} times in a row, last: {last.message}",
                remedy=f"correct the recipe; the next retry is in {reason.retry_in:.1f} s"
                + (f"; {last.remedy}" if last.remedy else ""),
                stage=reason.stage,
                command=last.command,
                output=last.output,
                retry_in=reason.retry_in,
            )
        case JobFailure(depth=None):
            return CreateError(reason.message, remedy=reason.remedy)
        case JobFailure():
            assert reason.depth is not None
            return StageError(
                reason.message,
                remedy=reason.remedy,
                number=reason.depth - 1,
                command=reason.command,
                output=reason.output,
            )


def _exhausted(found: Shortage) -> Exhausted:
    noun = "sandbox" if found.wanted == 1 else "sandboxes"
    if found.never:
        return Exhausted(
            f"{found.wanted} {noun} can never fit: the budget is {found.sandboxes} sandboxes and "
            f"{found.memory_limit >> 20} MiB of memory for idle ones",
            remedy="raise the budget, or request fewer",
            numbers=msgspec.structs.asdict(found),
        )
    if found.preparing:
        what = f"the stage {found.preparing!r} was still running"
        remedy = "allow more time, or prefetch the recipe"
    else:
        what = (
            f"{found.leased} of {found.sandboxes} sandboxes are leased, {found.idle} idle, "
            f"{found.making} being made, {found.resetting} being reset; "
            f"memory {found.memory >> 20} of {found.memory_limit >> 20} MiB; "
            f"{found.queue} {'request waits' if found.queue == 1 else 'requests wait'}"
        )
        remedy = "allow more time, or prefetch the recipe"
        if found.leased and found.waited:
            remedy = "release leases sooner, or raise the budget"
            if found.estimated_wait is not None:
                remedy += f"; at the present rate of returns the wait would be {found.estimated_wait:.1f} s"
    return Exhausted(
        f"no {found.wanted} {noun} within {found.waited:.3g} s: {what}",
        remedy=remedy,
        numbers=msgspec.structs.asdict(found),
    )
