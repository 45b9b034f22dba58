"""The substrate ``daytona`` without the SDK. tests/integrations has what needs it."""

from __future__ import annotations

import importlib.util

import pytest

from dutyfree import gc, substrates


async def test_without_the_sdk_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("DAYTONA_API_KEY", "any")
    seen = await substrates.probe("daytona")
    assert not seen.available
    assert seen.detail == "the package daytona is not installed"
    assert seen.remedy == "install it: pip install -e '/path/to/dutyfree[daytona]'"
    assert await gc._daytona(dry_run=False) == []
