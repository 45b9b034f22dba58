"""Runs in a sandbox: changes directory trees at random, or describes their content.

Every choice comes from the numbers it is given, so that the same numbers do the same to the same trees. It
needs nothing but a few modules of Python, so that images can be small.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence

TYPE_CHECKING = False  # typing is not in small images
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

NAMES = ("a", "b", "c", "d", "e")


class Walk:
    def __init__(self, roots: list[str], choices: Iterator[int]) -> None:
        self._roots = roots
        self._choices = choices
        self.moved = 0
        """Moves directories: an overlay needs redirects for those."""

    def step(self) -> None:
        operations: list[Callable[[], None]] = [
            self.move_directory, self.move_directory, self.move_directory, self.move_directory,
            self.move, self.move, self.make, self.make, self.write, self.write, self.append, self.resize,
            self.remove, self.remove_tree, self.replace_tree, self.chmod, self.chmod, self.chown, self.link,
            self.link, self.symlink, self.attribute, self.touch, self.fifo,
        ]  # fmt: skip
        try:
            self._pick(operations)()
        except OSError as error:
            if error.errno not in POSSIBLE:
                raise

    def move_directory(self) -> None:
        os.rename(self._pick(self._directories()), self._place())
        self.moved += 1

    def move(self) -> None:
        os.rename(self._pick(self._entries()), self._place())

    def make(self) -> None:
        os.mkdir(self._place())

    def write(self) -> None:
        path = self._place()
        if os.path.exists(path) and not os.path.isfile(path):
            return  # opening a FIFO would wait for a reader
        with open(path, "wb") as file:
            file.write(bytes([self._pick(range(256))]) * self._pick(range(9000)))

    def append(self) -> None:
        with open(self._pick(self._files()), "ab") as file:
            file.write(b"more")

    def resize(self) -> None:
        os.truncate(self._pick(self._files()), self._pick((0, 1, 5000, 1 << 20)))

    def remove(self) -> None:
        os.unlink(self._pick(self._files()))

    def remove_tree(self) -> None:
        clear(self._small())

    def replace_tree(self) -> None:
        path = self._small()
        clear(path)
        os.mkdir(path)

    def chmod(self) -> None:
        path = self._pick(self._entries())
        if not os.path.islink(path):
            os.chmod(path, self._pick((0o700, 0o4755, 0o2775, 0o644, 0o1777)))

    def chown(self) -> None:
        os.lchown(self._pick(self._entries()), self._pick((0, 5)), self._pick((0, 7)))

    def link(self) -> None:
        os.link(self._pick(self._files()), self._place())

    def symlink(self) -> None:
        os.symlink(self._pick(self._entries()), self._place())

    def attribute(self) -> None:
        path = self._pick(self._files() + self._directories())
        os.setxattr(path, "user." + self._pick(NAMES), self._pick((b"", b"1", b"x" * 300)))

    def touch(self) -> None:
        when = self._pick(range(2_000_000_000)) * 1_000_000_000 + self._pick(range(1_000_000_000))
        os.utime(self._pick(self._entries()), ns=(when, when), follow_symlinks=False)

    def fifo(self) -> None:
        os.mkfifo(self._place())

    def _pick(self, options: Sequence[T]) -> T:
        if not options:
            raise OSError(errno.ENOENT, "nothing to choose from")
        return options[next(self._choices) % len(options)]

    def _small(self) -> str:
        """A directory whose removal leaves most of the tree."""
        return self._pick([path for path in self._directories() if len(below(path)) < 5])

    def _place(self) -> str:
        return self._pick(self._roots + self._directories()) + "/" + self._pick(NAMES)

    def _entries(self) -> list[str]:
        return [path for root in self._roots for path in below(root)]

    def _files(self) -> list[str]:
        return [path for path in self._entries() if stat.S_ISREG(os.lstat(path).st_mode)]

    def _directories(self) -> list[str]:
        return [path for path in self._entries() if stat.S_ISDIR(os.lstat(path).st_mode)]


POSSIBLE = {
    errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.EXDEV,
    errno.EPERM, errno.EACCES, errno.EBUSY, errno.EOVERFLOW,
}  # fmt: skip
"""Errors that a normal program can meet; the last four without root. None that means a broken file system."""


def below(root: str) -> list[str]:
    found = []
    for name in sorted(os.listdir(root)):
        path = root + "/" + name
        found.append(path)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            found += below(path)
    return found


def clear(root: str) -> None:
    for path in reversed(below(root)):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            os.rmdir(path)
        else:
            os.unlink(path)
    os.rmdir(root)


def describe(root: str) -> Iterator[str]:
    """For each file: path, inode, and all attributes except access times."""
    for path in [root, *(below(root) if os.path.isdir(root) else ())]:
        info = os.lstat(path)
        words: list[object] = [oct(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns]
        if stat.S_ISREG(info.st_mode):
            with open(path, "rb") as file:
                data = file.read()
            words += [len(data), hash_of(data)]
        if stat.S_ISLNK(info.st_mode):
            words.append(os.readlink(path))
        elif not stat.S_ISFIFO(info.st_mode):
            words += [(name, os.getxattr(path, name)) for name in sorted(os.listxattr(path))]
        yield "\t".join([path, f"{info.st_dev}:{info.st_ino}", *map(repr, words)])


def hash_of(data: bytes) -> int:
    if not data.strip(b"\0"):
        return 0
    number = 0
    for at in range(0, len(data), 1 << 16):
        number = (number * 31 + int.from_bytes(data[at : at + (1 << 16)], "big")) % ((1 << 127) - 1)
    return number


def main(what: str, roots: str, *numbers: str) -> None:
    if what == "describe":
        for root in filter(os.path.lexists, roots.split(":")):
            for line in describe(root):
                print(line)
        return
    for root in roots.split(":"):
        os.utime(root)  # the times of the image `host` depend on when the engine made them
    walk = Walk(roots.split(":"), iter(int(number, 16) for number in numbers[1:]))
    for _ in range(int(numbers[0])):
        walk.step()
    print(walk.moved)


if __name__ == "__main__":
    main(*sys.argv[1:])
