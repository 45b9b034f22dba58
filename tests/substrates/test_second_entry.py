"""A substrate that is open is not opened again: what it holds would be lost."""

from __future__ import annotations

import pytest

import dutyfree
from dutyfree.contract.errors import UsageError


@pytest.mark.parametrize(
    "name",
    [
        "bare",
        pytest.param("native", marks=pytest.mark.native),
        pytest.param("native-warm", marks=pytest.mark.native),
        pytest.param("docker", marks=pytest.mark.docker),
    ],
)
async def test_a_second_entry_is_refused_and_harms_nothing(name: str) -> None:
    provider = dutyfree.open(name)
    async with provider as substrate:
        with pytest.raises(UsageError, match=f"^{name} is open already"):
            await provider.__aenter__()
        async with substrate.sandbox() as sandbox:
            assert (await sandbox.exec("echo here")).stdout == b"here\n"
