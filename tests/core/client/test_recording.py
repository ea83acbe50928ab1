"""Tool events that nobody awaits: in order, never an error, and waited for at a trajectory's end."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from apprentice.core.client import recording
from apprentice.core.client.recording import ToolRecording
from apprentice.core.errors import ServerUnavailable
from apprentice.core.records import ToolEvent


def event(name: str) -> ToolEvent:
    return ToolEvent(trajectory_id="trj-1", name=name)


async def test_events_are_sent_in_the_order_in_which_they_were_handed_over() -> None:
    """Also if an earlier one takes longer to make than all later ones."""
    sent: list[str] = []
    slow = threading.Event()

    async def send(item: ToolEvent) -> None:
        sent.append(item.name)

    def make_slowly() -> ToolEvent:
        slow.wait(10)
        return event("first")

    records = ToolRecording("trj-1", send)
    records.soon(make_slowly)
    for name in ("second", "third"):
        records.soon(lambda name=name: event(name))
    await asyncio.sleep(0)
    assert sent == []
    slow.set()
    await records.drain()
    assert sent == ["first", "second", "third"]


async def test_an_event_that_cannot_be_sent_is_warned_of_once_and_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    sent: list[str] = []

    async def send(item: ToolEvent) -> None:
        if item.name == "bad":
            raise ServerUnavailable("nobody is there")
        sent.append(item.name)

    records = ToolRecording("trj-1", send)
    for name in ("bad", "good", "bad", "fine"):
        records.soon(lambda name=name: event(name))
    with caplog.at_level(logging.WARNING, logger="apprentice"):
        await records.drain()
    assert sent == ["good", "fine"]
    assert records.failures == 2
    assert [entry.getMessage() for entry in caplog.records] == ["tool calls of trajectory trj-1 are missing in the ledger: nobody is there"]


async def test_draining_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(recording, "DRAIN_SECONDS", 0.05)
    never = asyncio.Event()

    async def send(_: ToolEvent) -> None:
        await never.wait()

    records = ToolRecording("trj-1", send)
    records.soon(lambda: event("stuck"))
    await records.drain()
    assert "not sent within 0.05 s" in caplog.text
    never.set()
    await records.drain()


def test_events_of_a_loop_that_ended_are_not_waited_for() -> None:
    async def send(_: ToolEvent) -> None:
        await asyncio.Event().wait()

    records = ToolRecording("trj-1", send)

    async def hand_over() -> None:
        records.soon(lambda: event("lost"))

    asyncio.run(hand_over())
    asyncio.run(records.drain())
    assert records.failures == 0
