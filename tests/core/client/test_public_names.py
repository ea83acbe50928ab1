"""`import apprentice`: the names, and what it may load."""

from __future__ import annotations

import subprocess
import sys

import apprentice


def test_the_public_names_are_sorted_and_all_there() -> None:
    assert apprentice.__all__ == sorted(apprentice.__all__)
    for name in apprentice.__all__:
        assert getattr(apprentice, name).__name__
    assert set(apprentice.__all__) <= set(dir(apprentice))


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    assert not hasattr(apprentice, "TrainableModle")


def test_the_client_loads_nothing_but_httpx_and_pydantic_of_what_is_heavy() -> None:
    heavy = ["torch", "transformers", "openai", "numpy", "fastapi", "uvicorn", "apprentice.core.server", "apprentice.core.training"]
    code = (
        "import sys, apprentice\n"
        "assert not any(name in sys.modules for name in ('httpx', 'pydantic')), 'loaded before they are needed'\n"
        "for name in apprentice.__all__: getattr(apprentice, name)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
