"""The OpenAPI document is true: Schemathesis makes up requests from it, and no answer contradicts it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("schemathesis", reason="to enable it: make test-integrations")

import requests
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.serving import serving

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("state")) as found:
        yield found


@pytest.fixture(scope="module")
def sandbox(url: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/v1/sandboxes", b'{"lease": 3600}')
    found = json.loads(connection.getresponse().read())["id"]
    connection.close()
    return str(found)


# A creation would ask registries for made-up images; the others wait for what never comes.
LEFT_OUT = ("prepare", "prefetch", "call", "restart", "pause")


def test_no_answer_contradicts_the_document(url: str, sandbox: str) -> None:
    document = schemathesis.openapi.from_url(f"{url}/v1/openapi.json")
    # 503 is an answer, when the machinery fails; a lease of 0 s fits the schema, and is refused.
    names = ("not_a_server_error", "positive_data_acceptance")
    excluded = [schemathesis.checks.CHECKS.get_one(name) for name in names]
    seen = 0
    for found in document.get_all_operations():
        operation = found.ok()
        name = operation.path.rpartition("/")[2]
        if name in LEFT_OUT or operation.method.upper() == "DELETE" or operation.path == "/v1/sandboxes":
            continue

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy())
        def judged(case: Any) -> None:
            if case.path_parameters:
                case.path_parameters["sandbox"] = sandbox
            if isinstance(case.body, dict) and "command" in case.body:
                case.body["command"] = "true"  # made-up ones may run for ever
            with requests.Session() as session:
                answer = case.call(base_url=url, session=session)
            assert answer.status_code < 500 or answer.status_code == 503, (case, answer.text)
            case.validate_response(answer, excluded_checks=excluded)

        judged()
        seen += 1
    assert seen > 20
