"""Find the definitions and the callers of a symbol, by syntax. Runs in the sandbox: ``symbols.py ROOT NAME``.

Only the standard library, and no more than Python 3.8: it is sent as text to whatever Python is there.
"""

import ast
import os
import sys


def search(root, name):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201 (read by any Python)
    """Lines such as ``definition src/a.py:12 Outer.name`` and ``call src/b.py:34 enclosing``, in order."""
    found = []
    for directory, _, files in sorted(os.walk(root)):
        for file in sorted(files):
            if file.endswith(".py"):
                path = os.path.join(directory, file)
                with open(path, encoding="utf-8") as stream:
                    _visit(ast.parse(stream.read()), path, (), name, found)
    return sorted(set(found))


def _visit(node, path, scope, name, found):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = (*scope, child.name)
            if child.name == name:
                found.append("definition %s:%d %s" % (path, child.lineno, ".".join(inner)))  # noqa: UP031
        elif isinstance(child, ast.Call):
            called = child.func
            if name in (getattr(called, "id", None), getattr(called, "attr", None)):
                found.append("call %s:%d %s" % (path, child.lineno, ".".join(scope) or "module"))  # noqa: UP031
        _visit(child, path, inner, name, found)


if __name__ == "__main__":
    print("\n".join(["begin", *search(sys.argv[1], sys.argv[2]), "end"]))  # noqa: T201 (its output is its answer)
