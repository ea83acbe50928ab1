"""The manifest of promises names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from manifest import MANIFEST, Promise

TESTS = Path(__file__).resolve().parent


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("promise", MANIFEST, ids=lambda promise: promise.id)
def test_every_promise_is_shown_by_tests_that_exist(promise: Promise) -> None:
    assert promise.tests
    for name in promise.tests:
        file, _, function = name.partition("::")
        assert (TESTS / file).is_file(), name
        found = functions(TESTS / file)
        assert function in found if function else any(test.startswith("test_") for test in found), name


def test_ids_are_unique() -> None:
    ids = [promise.id for promise in MANIFEST]
    assert len(ids) == len(set(ids))
