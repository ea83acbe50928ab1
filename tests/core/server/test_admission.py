"""The admission queue: bounded, first come first served, and nobody's slot is lost."""

from __future__ import annotations

import asyncio

import pytest

from apprentice.core.errors import DeadlineExceeded, QueueFull
from apprentice.core.server.admission import Admission


async def hold(admission: Admission, name: str, order: list[str], release: asyncio.Event) -> None:
    async with admission.slot():
        order.append(name)
        await release.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiters_get_their_turn_in_the_order_in_which_they_came() -> None:
    admission, order, release = Admission(2, 10, 60), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, name, order, release)) for name in "abcde"]
    await settle()
    assert (order, admission.running, admission.waiting) == (["a", "b"], 2, 3)
    release.set()
    await asyncio.gather(*tasks)
    assert order == list("abcde")
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    admission, order, release = Admission(1, 10, 60), [], asyncio.Event()
    first = asyncio.create_task(hold(admission, "first", order, release))
    second = asyncio.create_task(hold(admission, "second", order, asyncio.Event()))
    await settle()
    release.set()
    await first
    third = asyncio.create_task(hold(admission, "third", order, asyncio.Event()))
    await settle()
    assert order == ["first", "second"]
    for task in (second, third):
        task.cancel()
    await asyncio.gather(second, third, return_exceptions=True)
    assert (admission.running, admission.waiting) == (0, 0)


async def test_one_more_than_the_bound_is_turned_away() -> None:
    admission, order, release = Admission(1, 1, 60), [], asyncio.Event()
    tasks = [asyncio.create_task(hold(admission, name, order, release)) for name in "ab"]
    await settle()
    with pytest.raises(QueueFull, match="holds 1 waiting"):
        await hold(admission, "c", order, release)
    assert admission.refused == 1
    release.set()
    await asyncio.gather(*tasks)


async def test_a_wait_ends_at_its_deadline_and_is_counted() -> None:
    admission, order, release = Admission(1, 5, 0.0), [], asyncio.Event()
    task = asyncio.create_task(hold(admission, "a", order, release))
    await settle()
    with pytest.raises(DeadlineExceeded):
        await hold(admission, "b", order, release)
    assert (admission.expired, admission.waiting, admission.running) == (1, 0, 1)
    release.set()
    await task


async def test_a_waiter_that_is_cancelled_just_as_it_gets_its_turn_hands_it_on() -> None:
    admission, order = Admission(1, 5, 60), []
    releases = {name: asyncio.Event() for name in "abc"}
    tasks = {name: asyncio.create_task(hold(admission, name, order, releases[name])) for name in "abc"}
    await settle()
    releases["a"].set()
    while not tasks["a"].done():  # `a` hands its slot to `b`, which has not run yet
        await asyncio.sleep(0)
        if admission.waiting == 1:
            tasks["b"].cancel()
    await settle()
    assert order[-1] == "c"
    assert (admission.running, admission.waiting) == (1, 0)
    releases["c"].set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert admission.running == 0
