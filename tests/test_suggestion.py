from __future__ import annotations

import pytest

from dutyfree.suggestion import suggestion


@pytest.mark.parametrize(
    ("word", "meant"), [("natvie", "native"), ("dokcer", "docker"), ("NATIVE", "native"), ("bear", "bare")]
)
def test_names_the_closest_known_word(word: str, meant: str) -> None:
    assert suggestion(word, ["native", "docker", "bare"]) == f"did you mean {meant!r}?"


def test_keeps_the_spelling_of_the_known_word() -> None:
    assert suggestion("run_id", ["Run-Id"]) == "did you mean 'Run-Id'?"


@pytest.mark.parametrize("word", ["", "zzz", "kubernetes"])
def test_says_nothing_where_no_word_is_close(word: str) -> None:
    assert suggestion(word, ["native", "docker", "bare"]) == ""
    assert suggestion(word, []) == ""
