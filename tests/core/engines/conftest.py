"""A tiny Llama in memory, two adapters of it on disk, and what a test needs to check the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apprentice.core.config import AdapterConfig
from apprentice.core.training.base_models import resolve_base
from apprentice.core.training.policy import HostedModel


@pytest.fixture(scope="session")
def llama_host(tiny_llama_folder: Path) -> HostedModel:
    return HostedModel.load(resolve_base(str(tiny_llama_folder)), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def adapter_folders(llama_host: HostedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two adapters that clearly change the model, and differ from each other."""
    folders = []
    for number in (1, 2):
        name, folder = f"made-{number}", tmp_path_factory.mktemp(f"adapter-{number}")
        llama_host.add_adapter(name, AdapterConfig(rank=4), seed=number)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in llama_host.adapter_parameters(name).values():
                parameter.add_(0.08 * torch.randn(parameter.shape, generator=generator))
        llama_host.save_adapter(name, folder)
        llama_host.drop_adapter(name)
        folders.append(folder)
    return folders[0], folders[1]
