"""Schemathesis against the OpenAPI description: whatever it makes up, no answer is a server error, and every answer is as described."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from support.small_registry import SmallServer, small_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    with small_server(tmp_path_factory.mktemp("schemathesis")) as running:
        yield running


CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
BOUNDED = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_whatever_is_made_up_from_the_description_is_answered_as_described(server: SmallServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:

        @BOUNDED
        @given(case=operation.as_strategy())
        def answered_as_described(case: Case) -> None:
            response = case.call(timeout=30)
            case.validate_response(response, checks=CHECKS)

        answered_as_described()


def test_bodies_against_the_description_are_refused_and_break_nothing(server: SmallServer) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    refusable = [operation for operation in operations if operation.body]
    assert len(refusable) > 10
    for operation in refusable:

        @BOUNDED
        @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
        def answered(case: Case) -> None:
            response = case.call(timeout=30)
            case.validate_response(response, checks=CHECKS)

        answered()
