"""The conformance suite: checks that every substrate must pass.

Start with ``suite``; each module beside it has the checks of one subject. This room imports the contract and
the registry.

From the command line::

    python -m dutyfree.conformance bare
    python -m dutyfree.conformance my_package:MySubstrate --leave-out pause

Under pytest, for a substrate of your own::

    @pytest.mark.anyio
    @pytest.mark.parametrize("check", CHECKS, ids=str)
    async def test_conformance(check: Check) -> None:
        async with dutyfree.open("mine") as substrate:
            await check(substrate)
"""

from dutyfree.conformance import (  # noqa: I001 (each registers its checks, in this order)
    commands, output, processes, files, trees, lifecycle, environment, limits, abilities, actions,  # noqa: F401
    network, faults,  # noqa: F401
)  # fmt: skip
from dutyfree.conformance.suite import CHECKS, Check, CheckResult, Skipped, judge, named, select, tally

__all__ = ["CHECKS", "Check", "CheckResult", "Skipped", "judge", "named", "select", "tally"]
