"""The projects that workloads work on: open source, each with a bug that its next release fixed."""

from __future__ import annotations

import msgspec


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """A project whose release ``buggy`` fails a test of its release ``fixed``."""

    name: str
    """Its name on the package index, and the path of its repository in a sandbox."""
    buggy: str
    fixed: str
    digests: dict[str, str]
    """Release → SHA-256 of its source archive."""
    build_backend: str
    """The module of the build system that the archives name."""
    commit: str
    """The buggy commit, the head of ``main``."""
    patched: str
    """The only file that the fix changes."""
    sources: str
    """The directory of the sources."""
    new_tests: str
    """Tests of the fixed release below this path are part of the last commit."""
    subject: str
    """The subject of the last commit."""
    failing: str
    """The test that fails with the bug and passes with the fix."""
    python_path: str
    """The sources of the repository must come before an installed release, which a dependency may need."""
    packages: tuple[str, ...]
    """What its tests need."""
    byte_code: str = ""
    """Where Python writes byte code, if the repository does not ignore it; empty for beside the sources."""

    @property
    def python(self) -> dict[str, str]:
        """Variables for commands that run the project's Python code."""
        prefix = {"PYTHONPYCACHEPREFIX": self.byte_code} if self.byte_code else {}
        return {
            "PYTHONPATH": self.python_path,
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONNOUSERSITE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **prefix,
        }

    def is_test(self, path: str) -> bool:
        return path.startswith("tests/") or "/tests/" in path

    def is_source(self, path: str) -> bool:
        """Whether a file is part of the library, and not of its tests."""
        return path.startswith(f"{self.sources}/") and not self.is_test(path)


ATTRS = Project(
    name="attrs",
    buggy="25.2.0",
    fixed="25.3.0",
    digests={
        "25.2.0": "18a06db706db43ac232cce80443fcd9f2500702059ecf53489e3c5a3f417acaf",
        "25.3.0": "75d7cefc7fb576747b2c81b4442d4d4a1ce0900973527c011d1030fd3bf4af1b",
    },
    build_backend="hatchling.build",
    commit="ebfa157b16ea6e2f42ec44ed1c9e4445ed90ca48",
    patched="src/attr/_make.py",
    sources="src",
    new_tests="tests/",
    subject="Test that a field_transformer may be a generator",
    failing="tests/test_hooks.py::TestTransformHook::test_hook_generator",
    python_path="src:../deps",
    packages=("pytest", "hypothesis", "cloudpickle", "pympler"),
)

NETWORKX = Project(
    name="networkx",
    buggy="3.6",
    fixed="3.6.1",
    digests={
        "3.6": "285276002ad1f7f7da0f7b42f004bcba70d381e936559166363707fdad3d72ad",
        "3.6.1": "26b7c357accc0c8cde558ad486283728b65b6a95d85ee1cd66bafab4c8168509",
    },
    build_backend="setuptools.build_meta",
    commit="e249cf3a88924da7c7b61ad273b9d887041a9220",
    patched="networkx/classes/graph.py",
    sources="networkx",
    new_tests="networkx/classes/tests/test_graph.py",
    subject="Test that a subclass of Graph may take further arguments",
    failing="networkx/classes/tests/test_graph.py::test_graph_new_extra_args",
    python_path=".:../deps",
    packages=("pytest",),
    byte_code="../byte-code",
)

PROJECTS = {project.name: project for project in (ATTRS, NETWORKX)}
