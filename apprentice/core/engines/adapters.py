"""Which adapter of the hosted model serves a policy version."""

from __future__ import annotations

from .protocol import BASE, PolicyVersion


def adapter_name(version: PolicyVersion) -> str | None:
    """Name under which the engine loads a version beside the training adapters; None for the base model."""
    return None if version == BASE else f"serving:{version.policy}@{version.version}"
