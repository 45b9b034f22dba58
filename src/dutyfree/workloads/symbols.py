"""Find the definitions and the callers of a symbol, by syntax. Runs in the sandbox: ``symbols.py ROOT NAME``.

Only the standard library: it is sent as text to whatever Python is there.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator


def search(sources: Iterable[tuple[str, str]], name: str) -> list[str]:
    """Search (path, text) pairs. Gives ``call a/b.py:34 caller`` and ``definition a/c.py:12 Outer.name``."""
    return sorted({line for path, text in sources for line in _visit(ast.parse(text), path, (), name)})


def _visit(node: ast.AST, path: str, scope: tuple[str, ...], name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*scope, child.name)
            if child.name == name:
                yield f"definition {path}:{child.lineno} {'.'.join(inner)}"
        elif isinstance(child, ast.Call) and name in (
            getattr(child.func, "id", None),
            getattr(child.func, "attr", None),
        ):
            yield f"call {path}:{child.lineno} {'.'.join(scope) or 'module'}"
        yield from _visit(child, path, inner, name)


def _sources(root: str) -> Iterator[tuple[str, str]]:
    for directory, _, files in os.walk(root):
        for file in files:
            if file.endswith(".py"):
                path = f"{directory}/{file}"
                with open(path, encoding="utf-8") as stream:
                    yield path, stream.read()


if __name__ == "__main__":
    print("begin", *search(_sources(sys.argv[1]), sys.argv[2]), "end", sep="\n")  # noqa: T201 (its answer)
