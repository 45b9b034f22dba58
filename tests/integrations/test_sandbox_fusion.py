"""The client package of SandboxFusion, unmodified, against our server."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

pytest.importorskip("sandbox_fusion", reason="to enable it: make test-integrations")

from sandbox_fusion import (
    RunCodeRequest,
    RunStatus,
    SummaryMapping,
    run_code,
    run_code_async,
    summary_run_code_result,
)

from tests.serving import serving

pytestmark = pytest.mark.native

SUMMARY = SummaryMapping(
    Success="ok",
    Failed="failed",
    CompileFailed="compile",
    CompileTimeout="slow",
    RunFailed="run",
    RunTimeout="time",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.mark.parametrize(
    ("language", "code", "tool"),
    [
        ("python", "print(sum(map(int, input().split())))", "python3"),
        ("bash", "read a b; echo $((a + b))", "bash"),
        (
            "cpp",
            "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a + b << '\\n'; }",
            "g++",
        ),
        (
            "nodejs",
            "console.log(require('fs').readFileSync(0, 'utf8').split(' ').reduce((a, b) => +a + +b))",
            "node",
        ),
    ],
)
def test_languages(url: str, language: str, code: str, tool: str) -> None:
    found = run_code(RunCodeRequest(code=f"command -v {tool}", language="bash"), url, max_attempts=1)
    request = RunCodeRequest(code=code, language=language, stdin="19 23")
    if found.status != RunStatus.Success:
        with pytest.raises(Exception, match=f"no {tool}"):
            run_code(request, url, max_attempts=1)
        pytest.skip(f"the image has no {tool}; to enable it: apt-get install it on this machine")
    answer = run_code(request, url, max_attempts=1)
    assert summary_run_code_result(answer, SUMMARY) == "ok"
    assert answer.run_result.stdout == "42\n"


@pytest.mark.parametrize(
    ("request_", "summary"),
    [
        (RunCodeRequest(code="exit 3", language="bash"), "run"),
        (RunCodeRequest(code="while True: pass", language="python", run_timeout=0.5), "time"),
        (RunCodeRequest(code="this is not C++", language="cpp"), "compile"),
    ],
    ids=["fails", "endless", "does not compile"],
)
def test_failures_are_those_of_the_program(url: str, request_: RunCodeRequest, summary: str) -> None:
    assert summary_run_code_result(run_code(request_, url, max_attempts=1), SUMMARY) == summary


async def test_files_in_both_directions(url: str) -> None:
    request = RunCodeRequest(
        code="open('out', 'w').write(open('dir/in').read().upper())",
        language="python",
        files={"dir/in": base64.b64encode(b"text").decode()},
        fetch_files=["out", "missing"],
    )
    answer = await run_code_async(request, url, max_attempts=1)
    assert {name: base64.b64decode(data) for name, data in answer.files.items()} == {"out": b"TEXT"}


def test_a_language_that_is_not_there_is_no_failure_of_the_program(url: str) -> None:
    with pytest.raises(Exception, match="no language 'racket'"):
        run_code(RunCodeRequest(code="", language="racket"), url, max_attempts=1)
