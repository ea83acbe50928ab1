"""tools/setup_servers.py: one installation however many ask, an interrupted one is done anew, pins decide the folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support import mcp_servers

setup: Any = mcp_servers._setup()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Installations that were made, in an empty folder for servers."""
    made: list[Path] = []

    def install(folder: Path, packages: tuple[str, ...]) -> None:
        folder.mkdir(parents=True)
        time.sleep(0.05)
        made.append(folder)

    monkeypatch.setenv("APPRENTICE_SERVERS", str(tmp_path / "servers"))
    monkeypatch.setattr(setup, "_install_pip", install)
    return made


def test_many_that_ask_at_once_get_one_installation(installed: list[Path]) -> None:
    threads = [threading.Thread(target=setup.install, args=("time",)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(installed) == 1
    assert setup.argv("time") == [str(installed[0] / "bin" / "mcp-server-time"), "--local-timezone", "UTC"]
    assert setup.argv("time", "--local-timezone", "Asia/Tokyo")[1:] == ["--local-timezone", "Asia/Tokyo"]
    assert len(installed) == 1


def test_an_interrupted_installation_is_done_anew(installed: list[Path]) -> None:
    half = setup.RECIPES["time"].folder("time")
    half.mkdir(parents=True)
    (half / "rubbish").touch()
    assert setup.install("time") == half
    assert installed == [half]
    assert not (half / "rubbish").exists()


def test_other_pins_are_another_folder(installed: list[Path]) -> None:
    recipe = setup.RECIPES["time"]
    assert setup.Recipe(recipe.kind, ("mcp-server-time==1",), recipe.entry).folder("time") != recipe.folder("time")


def test_an_unknown_server_is_one_sentence() -> None:
    with pytest.raises(setup.NotInstallable, match="there is no server 'weather' here; there are time, sqlite"):
        setup.argv("weather")
