"""The documentation site that ``make docs`` builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, ROOT / "scripts/build-docs", target], check=True, capture_output=True)
    return target


def links(page: Path) -> set[str]:
    text = re.sub(r"<(pre|script|style)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
    return {link for link in re.findall(r'\b(?:href|src)="([^"]+)"', text) if not re.match(r"[a-z]+:", link)}


def test_every_link_between_pages_leads_somewhere(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for link in links(page):
            path, _, anchor = unquote(link).partition("#")
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name} links to {link}"
            if anchor and there.parent == site:
                assert f'id="{anchor}"' in there.read_text(), f"{page.name} links to {link}"


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("dutyfree/contract.html", "Sandbox.exec"),
        ("dutyfree/contract/errors.html", "ActionError"),
        ("dutyfree/contract/abilities.html", "Forkable.fork"),
        ("dutyfree/recipes.html", "repository"),
        ("dutyfree/substrates/native.html", "NativeConfig"),
    ],
)
def test_the_reference_has_what_users_call(site: Path, page: str, name: str) -> None:
    assert f'id="{name}"' in (site / "reference" / page).read_text()
