"""Shared fixtures. This file's folder is on the import path, so tests write `from support.tiny_models import tiny_llama`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings

# The same examples on every run, so that a red test means a change; HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("repeat", derandomize=True)
settings.register_profile("explore", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(scope="session")
def tiny_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama on disk; shared, so treat it as read-only."""
    from support.tiny_models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with Qwen3's chat template on disk; shared, so treat it as read-only."""
    from support.tiny_models import tiny_qwen3

    return tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny-qwen3")
