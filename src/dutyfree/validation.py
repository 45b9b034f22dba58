"""Explain in words what is wrong with a table that a user wrote: msgspec finds the mistake, this explains it.

A type may help with ``msgspec.Meta``: its ``description`` names a value ("a number of trials"), and its
``examples`` show one in TOML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import inspect

LONGEST = 60
"""How many characters of a wrong value are shown."""

Place: TypeAlias = tuple[str | tuple[int, int], ...]
"""Keys, and items of lists as (number from 1, length of the list)."""


class Mistake(NamedTuple):
    """What is wrong, and what to do."""

    message: str
    remedy: str = ""


def explain(error: msgspec.ValidationError, table: object, wanted: Any) -> Mistake:
    """Explain why ``table`` could not be converted to the type ``wanted``."""
    found = _find(table, inspect.type_info(wanted), ())
    if found is not None:
        return found
    # The type has its own check, as Limits does, which says in words what is wrong.
    what, _, where = str(error).partition(" - at `$")
    keys = re.sub(r"\[[^]]*\]", "", where).strip("`.")
    return Mistake(f"{keys}: {what}" if keys and not what.startswith(keys) else what)


def _find(value: object, kind: inspect.Type, at: Place) -> Mistake | None:
    """The first mistake in the value; None if there is none."""
    match kind:
        case inspect.Metadata(type=inner):
            return _wrong(value, kind, at) if _misfit(value, inner) else _find(value, inner, at)
        case inspect.UnionType(types=types):
            return _in_union(value, kind, types, at)
        case inspect.StructType() if isinstance(value, dict):
            return _in_struct(value, kind, at)
        case inspect.DictType() if isinstance(value, dict):
            found = (_find(one, kind.value_type, (*at, str(key))) for key, one in value.items())
            return next(filter(None, found), None)
        case inspect.ListType() | inspect.VarTupleType() if isinstance(value, list | tuple):
            found = (
                _find(one, kind.item_type, (*at, (number, len(value)))) for number, one in enumerate(value, 1)
            )
            return next(filter(None, found), None)
        case _:
            return _wrong(value, kind, at) if _misfit(value, kind) else None


def _in_union(
    value: object, kind: inspect.UnionType, types: tuple[inspect.Type, ...], at: Place
) -> Mistake | None:
    found = [_find(value, one, at) for one in types]
    if None in found:
        return None
    # If the value has the right type and a mistake inside, report the mistake inside.
    inside = [one for one, member in zip(found, types, strict=True) if not _misfit(value, member)]
    return inside[0] if inside else _wrong(value, kind, at)


def _in_struct(value: dict[Any, Any], kind: inspect.StructType, at: Place) -> Mistake | None:
    known = {field.encode_name: field for field in kind.fields}
    keys = f"the keys are: {', '.join(known)}" if known else "it has no keys"
    for key in value:
        if key not in known and key != kind.tag_field and kind.forbid_unknown_fields:
            meant = suggestion(str(key), known)
            return Mistake(f"{_within(at)}there is no key {key!r}", " ".join(filter(None, [meant, keys])))
    for name, field in known.items():
        if name in value and (found := _find(value[name], field.type, (*at, name))):
            return found
    missing = [name for name, field in known.items() if field.required and name not in value]
    return Mistake(f"{_within(at)}the key {missing[0]!r} is missing", keys) if missing else None


def _misfit(value: object, kind: inspect.Type) -> bool:
    """Whether the value has another type. It does not look into tables and lists."""
    match kind:
        case inspect.Metadata(type=inner):
            return _misfit(value, inner)
        case inspect.UnionType(types=types):
            return all(_misfit(value, one) for one in types)
        case inspect.StructType(cls=struct):
            return not isinstance(value, dict | struct)
        case inspect.DictType():
            return not isinstance(value, dict)
        case inspect.ListType() | inspect.VarTupleType():
            return not isinstance(value, list | tuple)
        case inspect.IntType() | inspect.FloatType():
            numbers = int if isinstance(kind, inspect.IntType) else (int, float)
            return not isinstance(value, numbers) or isinstance(value, bool) or _out_of_bounds(value, kind)
        case inspect.StrType():
            return not isinstance(value, str)
        case inspect.BoolType():
            return not isinstance(value, bool)
        case inspect.NoneType():
            return value is not None
        case inspect.LiteralType(values=values):
            return value not in values
        case _:
            return False


def _out_of_bounds(value: float, kind: inspect.IntType | inspect.FloatType) -> bool:
    return (
        (kind.ge is not None and not value >= kind.ge)
        or (kind.gt is not None and not value > kind.gt)
        or (kind.le is not None and not value <= kind.le)
        or (kind.lt is not None and not value < kind.lt)
    )


def _wrong(value: object, kind: inspect.Type, at: Place) -> Mistake:
    return Mistake(f"{_named(at)} must be {_words(kind, value)}, not {_shown(value)}")


def _words(kind: inspect.Type, value: object) -> str:
    """Describe the expected value; the actual value may serve as an example."""
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=told):
            examples = (told or {}).get("examples")
            words = (told or {}).get("description") or _words(inner, value).partition(", such as ")[0]
            return f"{words}{_bounds(inner)}" if not examples else f"{words}, such as {examples[0]}"
        case inspect.UnionType(types=types):
            return " or ".join(_words(one, value) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.StructType(fields=fields):
            some = ", ".join(f"{field.encode_name} = …" for field in fields[:2])
            return f"a table, such as {{{some}}}"
        case inspect.DictType(value_type=of):
            return f"a table, such as {{name = {_example(of, None)}}}"
        case inspect.ListType(item_type=of) | inspect.VarTupleType(item_type=of):
            return f"a list, such as [{_example(of, value)}]"
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{noun}{_bounds(kind)}"
        case inspect.StrType():
            return "a string"
        case inspect.BoolType():
            return "true or false"
        case inspect.LiteralType(values=values):
            choices = [repr(one) for one in values]
            return " or ".join(choices) if len(choices) < 3 else f"one of {', '.join(choices)}"
        case _:
            return "something else"


def _example(kind: inspect.Type, value: object) -> str:
    match kind:
        case inspect.StrType():
            return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else '"…"'
        case inspect.StructType() | inspect.DictType():
            return "{…}"
        case inspect.ListType() | inspect.VarTupleType():
            return "[…]"
        case _:
            return "1"


def _bounds(kind: inspect.Type) -> str:
    if not isinstance(kind, inspect.IntType | inspect.FloatType):
        return ""
    signs = (("≥", kind.ge), (">", kind.gt), ("≤", kind.le), ("<", kind.lt))
    told = [f"{sign} {bound:g}" for sign, bound in signs if bound is not None]
    return f" {' and '.join(told)}" if told else ""


def _shown(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str() | int() | float():
            text = repr(value)
            return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        case list() | tuple():
            return "a list"
        case dict():
            return "a table"
        case None:
            return "nothing"
        case _:
            return "a date or time"


def _named(at: Place) -> str:
    """``[options.small] image``, ``service 2 of 3: [env] A``, ``substrates: item 1 of 2``."""
    if not at:
        return "it"
    *before, last = at
    if isinstance(last, str):
        return f"{_tables(tuple(before))}{last}"
    return f"{_named(tuple(before))}: item {last[0]} of {last[1]}"


def _within(at: Place) -> str:
    """A prefix that names the table of a key."""
    told = _tables(at)
    return f"in {told}" if told.startswith("[") else told


def _tables(at: Place) -> str:
    told, keys = "", list[str]()
    for one in at:
        if isinstance(one, str):
            keys.append(one)
        else:
            name = keys.pop().removesuffix("s") if keys else "item"
            told += f"{_header(keys)}{name} {one[0]} of {one[1]}: "
            keys = []
    return told + _header(keys)


def _header(keys: list[str]) -> str:
    return f"[{'.'.join(keys)}] " if keys else ""


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean 'native'?``, or empty if no known word is similar."""
    import difflib  # only for an error

    lowered = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), lowered, n=1)
    return f"did you mean {lowered[close[0]]!r}?" if close else ""
