"""The OpenAPI document is true: Schemathesis makes up requests from it, and no answer contradicts it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("schemathesis", reason="to enable it: make test-integrations")

import schemathesis
from hypothesis import HealthCheck, settings

from tests.serving import serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/v1/openapi.json")


@pytest.fixture(scope="module")
def sandbox(url: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/v1/sandboxes", b'{"lease": 3600}')
    return str(json.loads(connection.getresponse().read())["id"])


schema = schemathesis.pytest.from_fixture("document")


# A creation would ask registries for made-up images; the others wait for what never comes.
@(
    schema.exclude(path="/v1/sandboxes", method="POST")
    .exclude(path_regex="prepare|prefetch|call$|restart")
    .parametrize()
)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_answer_contradicts_the_document(case: Any, sandbox: str) -> None:
    if case.path_parameters:
        case.path_parameters["sandbox"] = sandbox
    if isinstance(case.body, dict) and "command" in case.body:
        case.body["command"] = "true"  # made-up ones may run for ever
    answer = case.call()
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    case.validate_response(answer, excluded_checks=[schemathesis.checks.not_a_server_error])
