"""Mistakes in tables that users write are explained in words, and every one that msgspec finds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from dutyfree import Limits, validation
from dutyfree.recipes.toml import RecipeFile
from dutyfree.study.plan import Plan
from dutyfree.validation import suggestion

JARGON = re.compile(r"`|\$|Expected|Object|Invalid|enum|\b(int|str|bool|float|array|object|null|NoneType)\b")


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[int, Meta(description="a number of bytes", ge=1)]
    words: tuple[str, ...] = ()


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    mode: Literal["on", "off"] | tuple[str, ...] | None = None
    inner: Inner | None = None
    inners: tuple[Inner, ...] = ()
    table: Mapping[str, int] = {}
    flag: bool = False


def explained(table: object, wanted: Any) -> validation.Mistake:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(table, wanted)
    return validation.explain(raised.value, table, wanted)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "it must be a table, such as {name = …, share = …}, not a list"),
        ({}, "the key 'name' is missing"),
        ({"nmae": "a"}, "there is no key 'nmae'"),
        ({"name": None}, "name must be a string, not nothing"),
        ({"name": "a", "share": 0}, "share must be a number > 0 and ≤ 1, not 0"),
        ({"name": "a", "mode": "of"}, """mode must be 'off' or 'on' or a list, such as ["of"], not 'of'"""),
        ({"name": "a", "mode": [1]}, "mode: item 1 of 1 must be a string, not 1"),
        ({"name": "a", "inner": 1}, "inner must be a table, such as {size = …, words = …}, not 1"),
        ({"name": "a", "inner": {"size": 0}}, "[inner] size must be a number of bytes ≥ 1, not 0"),
        (
            {"name": "a", "inner": {"size": "x" * 99}},
            f"[inner] size must be a number of bytes ≥ 1, not '{'x' * 58}…",
        ),
        ({"name": "a", "inner": {"siez": 1}}, "in [inner] there is no key 'siez'"),
        ({"name": "a", "inners": [{"size": 1}, {}]}, "inner 2 of 2: the key 'size' is missing"),
        (
            {"name": "a", "inners": [{"size": 1, "words": "b"}]},
            "inner 1 of 1: words must be a list, such as [\"b\"], not 'b'",
        ),
        ({"name": "a", "table": {"k": 1.5}}, "[table] k must be a whole number, not 1.5"),
        ({"name": "a", "table": 3}, "table must be a table, such as {name = 1}, not 3"),
        ({"name": "a", "flag": "yes"}, "flag must be true or false, not 'yes'"),
    ],
)
def test_mistakes_in_words(table: object, message: str) -> None:
    assert explained(table, Outer).message == message


def test_the_remedy_of_a_mistyped_key() -> None:
    keys = "the keys are: name, share, mode, inner, inners, table, flag"
    assert explained({"nmae": "a"}, Outer).remedy == f"did you mean 'name'? {keys}"
    assert explained({"zzz": "a"}, Outer).remedy == keys


def test_a_check_of_the_type_itself_speaks_for_itself() -> None:
    told = explained({"limits": {"memory": 0}}, msgspec.defstruct("_", [("limits", Limits)]))
    assert told.message.startswith("limits: memory must be ")
    assert not JARGON.search(told.message)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(-1, 2) | st.sampled_from(["on", "off", "a"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["name", "size", "words", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def tables(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from([*kind.__struct_fields__, "else"]), values, max_size=4)


@pytest.mark.parametrize("kind", [Outer, Plan, RecipeFile, Limits])
@given(data=st.data())
def test_whatever_msgspec_refuses_is_explained_and_nothing_else(kind: Any, data: st.DataObject) -> None:
    table = data.draw(values | tables(kind))
    try:
        msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        told = validation.explain(error, table, kind)
        assert told.message
        assert not JARGON.search(told.message), told
    else:
        assert validation._find(table, msgspec.inspect.type_info(kind), ()) is None


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
