"""What tests of the server share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from apprentice.core.server.ledger import Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger of the test's own."""
    with Ledger.open(tmp_path / "runs.db") as opened:
        yield opened
