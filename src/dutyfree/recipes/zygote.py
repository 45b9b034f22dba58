"""A preloaded interpreter: it imports modules once, and forks for each call (docs/warm-processes.md).

It runs in the sandbox, sent as text to the Python there: ``python3 -c ZYGOTE MODULE...``. So it uses only the
standard library, and nothing newer than Python 3.8. Descriptor 3 is a socket to PID 1, which requests forks
in advance, and sends each its streams, directory, variables and arguments. A fork runs them as
``python3 ARGUMENTS...`` would. If a new interpreter would start differently, the fork executes a new one.
"""

from __future__ import annotations

import sys

STARTED = frozenset(sys.modules)
"""The modules that an interpreter has before it searches its path."""

import array
import atexit
import fcntl
import gc
import importlib
import importlib.machinery
import os
import runpy
import signal
import socket
import stat
import struct
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

CONTROL = 3
ASKED = 8
EXEC = struct.Struct("=QIIIII4x")

SETTLED = ("PYTHON", "LC_", "LD_", "MALLOC_", "GLIBC_TUNABLES", "LANG", "HOME", "PATH", "TZ")
"""Prefixes of variables that an interpreter reads only at its start.

PYTHONPATH is an exception, because a fork can change its path.
"""

EXPLAINED = "DUTYFREE_EXPLAIN"
"""If a call has this variable, stderr says why the call got a new interpreter."""

SUFFIXES = importlib.machinery.all_suffixes()

OURS = globals()

LEFT: list[Any] = []
"""Modules that are not destroyed at the exit: this list refers to itself and is frozen, so gc skips it."""
LEFT.append(LEFT)


def receive(connected: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive one message and its descriptors; empty at the end."""
    data, ancillary, _, _ = connected.recvmsg(size, socket.CMSG_SPACE(most * 4), socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(value[: len(value) // 4 * 4])
    return data, list(descriptors)


# --- Preloaded modules ----------------------------------------------------------------------------------


def settled(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that an interpreter reads only at its start."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(SETTLED) and value and name != "PYTHONPATH"
    }


def path_of(variables: Mapping[str, str]) -> list[str]:
    """The absolute entries of PYTHONPATH."""
    wanted = variables.get("PYTHONPATH")
    return [os.path.abspath(entry) for entry in wanted.split(os.pathsep)] if wanted else []


def mark_of(path: str) -> tuple[int, int, int] | None:
    """A mark of a file that changes when the file changes."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def path_files(directories: Iterable[str]) -> dict[str, Any]:
    """The ``.pth`` files, which add to the path at the start of an interpreter."""
    found = {}
    for directory in directories:
        for name in names_in(directory):
            if name.endswith(".pth"):
                path = os.path.join(directory, name)
                found[path] = mark_of(path)
    return found


def names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


class Preloaded:
    """The imported modules, their files, and everything that would change their import."""

    def __init__(self, names: Sequence[str]) -> None:
        atexit.register(self.leave)  # registered first, so it runs last
        self.names: set[str] = set()
        self.variables = settled(os.environ)
        given = path_of(os.environ)
        before = [entry for entry in sys.path[1:] if entry not in given]
        for name in names:
            importlib.import_module(name)
        after = [entry for entry in sys.path[1:] if entry not in given and entry not in before]
        self.base = before + after
        self.names = set(sys.modules) - {"sys", "builtins", "__main__"}
        self.sites = [entry for entry in self.base if entry.endswith("-packages")]
        self.path_files = path_files(self.sites)
        self.files: dict[str, Any] = {}
        self.places: dict[str, str] = {}
        """Top-level module → the directory in which it was found."""
        for name in self.names - STARTED:
            path = getattr(sys.modules[name], "__file__", None)
            if path:
                self._add(name, os.path.abspath(path))

    def _add(self, name: str, path: str) -> None:
        library = os.path.dirname(os.__file__) + os.sep
        if not path.startswith(library) or "-packages" + os.sep in path:
            self.files[path] = mark_of(path)
        if "." not in name:
            place = os.path.dirname(path)
            is_package = os.path.basename(path).startswith("__init__.")
            self.places[name] = os.path.dirname(place) if is_package else place

    def difference(self, variables: Mapping[str, str], first: str) -> str | None:
        """Why a new interpreter with these variables and this first path entry would differ; None if not."""
        now = settled(variables)
        if now != self.variables:
            return "variables: " + " ".join(sorted(dict(now.items() ^ self.variables.items())))
        if path_files(self.sites) != self.path_files:
            return "files that add to the path: " + " ".join(self.sites)
        path = [first, *path_of(variables), *self.base]
        for name, place in self.places.items():
            if place not in path:
                return f"{place} is not in the path, but {name} was imported from it"
        for name, mark in self.files.items():
            if mark_of(name) != mark:
                return f"{name} has changed"
        return self._hidden([entry for entry in path if entry not in self.base])

    def _hidden(self, before: Sequence[str]) -> str | None:
        """Find a module in these directories that would be imported instead of a preloaded one."""
        for at, directory in enumerate(before):
            there = set(names_in(directory))
            for name, place in self.places.items():
                if place in before[: at + 1]:
                    continue
                package = os.path.join(directory, name, "__init__") if name in there else ""
                for suffix in SUFFIXES:
                    if name + suffix in there or (package and os.path.exists(package + suffix)):
                        return f"{directory} has another {name}"
        return None

    def leave(self) -> None:
        """Keep the preloaded modules from being destroyed, which takes most of the time of an exit.

        If a file is open for writing, they are destroyed, because a module may have data to flush.
        """
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            try:
                if descriptor > 2 and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE:
                    return
            except OSError:  # the descriptor of this listing
                continue
        LEFT.extend(sys.modules.pop(name, None) for name in self.names)


# --- Forks ----------------------------------------------------------------------------------------------


def fork() -> bool:
    """Make a copy of this process whose parent is PID 1. Returns True in the copy. Raises OSError."""
    orphaned, held = os.pipe()
    try:
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            return False
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(1)
        # The pipe closes when the middle process has ended: then PID 1 is our parent.
        os.close(held)
        held = -1
        os.read(orphaned, 1)
        os.close(CONTROL)
        os.setsid()
        return True
    finally:
        os.close(orphaned)
        if held >= 0:
            os.close(held)


def fail(name: str, error: OSError) -> NoReturn:
    os.write(2, os.fsencode(f"{name}: {error.strerror}\n"))
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def take(connected: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Wait for a call, and take its streams and directory. Returns its arguments and variables."""
    data, descriptors = receive(connected, 1, 4)
    if not data:
        os._exit(0)
    connected.send(b"\0")  # the call has begun
    connected.close()
    for number in range(3):
        os.dup2(descriptors[number], number)
        os.close(descriptors[number])
    with open(descriptors[3], "rb") as file:
        request = file.read()
    count = EXEC.unpack_from(request)[4]
    words = [os.fsdecode(word) for word in request[EXEC.size :].split(b"\0")[:-1]]
    directory, arguments, variables = words[1], words[2 : 2 + count], words[2 + count :]
    try:
        os.chdir(directory or ".")
    except OSError as error:
        fail(directory, error)
    pairs = [variable.partition("=") for variable in variables]
    return arguments, {name: value for name, _, value in pairs}


def become(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Execute a new interpreter."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(sys.executable, ["python3", *arguments], variables)
    except OSError as error:
        fail(sys.executable, error)


def program_of(arguments: Sequence[str]) -> tuple[str, str] | None:
    """How to run the program, and its first path entry; None if it needs a new interpreter."""
    kind = arguments[0]
    if kind in ("-c", "-m") and len(arguments) > 1:
        return kind, "" if kind == "-c" else os.getcwd()
    try:
        if kind.startswith("-") or not stat.S_ISREG(os.stat(kind).st_mode) or not kind.endswith(".py"):
            return None
    except OSError:
        return None
    return "script", os.path.dirname(os.path.realpath(kind))


def prepare(preloaded: Preloaded, arguments: Sequence[str], variables: Mapping[str, str], first: str) -> None:
    """Set variables, path and seeds, as an interpreter does at its start."""
    for name in [name for name in os.environ if name not in variables]:
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    path = path_of(variables)
    sys.path[:] = [first, *path, *(entry for entry in preloaded.base if entry not in path)]
    sys.path_importer_cache.clear()  # the directories may have changed
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = ["python3", *arguments]
    if "numpy" in sys.modules:  # the random module seeds itself after a fork
        sys.modules["numpy"].random.seed()


def run(kind: str, arguments: Sequence[str]) -> None:
    main: Any = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    if kind == "-m":
        sys.argv[:] = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    text: str | bytes
    if kind == "-c":
        sys.argv[:] = ["-c", *arguments[2:]]
        main.__loader__ = importlib.machinery.BuiltinImporter
        text, name = arguments[1], "<string>"
    else:
        sys.argv[:] = arguments
        name = arguments[0]
        main.__file__ = os.path.abspath(name)
        main.__cached__ = None
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        with open(name, "rb") as file:
            text = file.read()
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)  # noqa: S102 (the purpose of this program)


def hide_our_frames() -> None:
    """Remove the frames of this program from tracebacks."""
    print_error = sys.excepthook

    def print_rest(kind: Any, value: Any, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_globals is OURS:
            trace = trace.tb_next
        print_error(kind, value.with_traceback(trace), trace)

    sys.excepthook = print_rest


def work(preloaded: Preloaded, connected: socket.socket) -> None:
    """Run one call, in a fork."""
    # Do in advance what every call does, so that its memory pages are already copied when the call comes.
    preloaded.difference(os.environ, os.getcwd())
    exec(compile("def none(): pass\nnone()", "", "exec"), {})  # noqa: S102
    connected.send(b"\0")
    arguments, variables = take(connected)
    program = program_of(arguments)
    differs = "arguments" if program is None else preloaded.difference(variables, program[1] or os.getcwd())
    if program is None or differs is not None:
        if EXPLAINED in variables:
            os.write(2, os.fsencode(f"a new interpreter, for what differs: {differs}\n"))
        become(arguments, variables)
    kind, first = program
    prepare(preloaded, arguments, variables, first)
    try:
        run(kind, arguments)
    except BaseException:
        hide_our_frames()
        raise


def serve() -> socket.socket:
    """Fork at each request of PID 1. Returns only in the forks, with the socket of the fork."""
    control = socket.socket(fileno=CONTROL)
    while True:
        data, descriptors = receive(control, ASKED, 1)
        if not data:
            os._exit(0)
        connected = socket.socket(fileno=descriptors[0])
        try:
            if fork():
                control.detach()
                return connected
        except OSError as error:  # no process is left: PID 1 sees that its socket is closed
            os.write(2, os.fsencode(f"fork: {error.strerror}\n"))
        connected.close()


def main(names: Sequence[str]) -> None:
    preloaded = Preloaded(names)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a module runs a thread, which a fork would not have: " + " ".join(names))
    differs = preloaded.difference(os.environ, os.getcwd())
    if differs is not None:  # no fork could ever be used
        sys.exit(f"this cannot be preloaded: {differs}")
    gc.collect()
    gc.freeze()
    print("ready", flush=True)  # noqa: T201
    connected = serve()
    work(preloaded, connected)


if __name__ == "__main__":
    main(sys.argv[1:])
