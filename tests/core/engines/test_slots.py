"""The slot pool: whatever sequences come and go, a cached slot holds what its sequence's prefix says, and none is lost."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from apprentice.core.engines.protocol import BASE, PolicyVersion
from apprentice.core.engines.slots import Lease, SlotPool

SIZE = 4
VERSIONS = (BASE, PolicyVersion("mail/agent", 1))


class Cache:
    """A pool with the contents of its slots: what was computed there, after which tokens, by which version."""

    def __init__(self, pages: int) -> None:
        self.contents: dict[int, object] = {}
        self.pool = SlotPool(pages, SIZE, self.clear)

    def clear(self, page: int) -> None:
        for slot in range(page * SIZE, (page + 1) * SIZE):
            self.contents.pop(slot, None)

    def start(self, version: PolicyVersion, ids: list[int]) -> Lease:
        lease, copy = self.pool.lease(version, ids)
        if copy is not None:
            for at in range(copy.count):
                self.contents[copy.target * SIZE + at] = self.contents[copy.source * SIZE + at]
        assert lease.length == lease.cached < len(ids)
        return lease

    def compute(self, lease: Lease, ids: list[int], tokens: int) -> None:
        for offset, slot in enumerate(self.pool.slots(lease, tokens)):
            self.contents[slot] = (lease.version, tuple(ids[: lease.length + offset + 1]))
        self.pool.commit(lease, ids[lease.length : lease.length + tokens])

    def check(self, lease: Lease, ids: list[int]) -> None:
        for at in range(lease.length):
            slot = lease.pages[at // SIZE].index * SIZE + at % SIZE
            assert self.contents[slot] == (lease.version, tuple(ids[: at + 1]))


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), pages=st.integers(3, 16))
def test_random_sequences_always_read_their_own_prefix_and_every_page_comes_back(seed: int, pages: int) -> None:
    chooser = random.Random(seed)
    cache = Cache(pages)
    open_leases: list[tuple[Lease, list[int]]] = []
    for _ in range(60):
        if open_leases and chooser.random() < 0.4:
            cache.pool.release(open_leases.pop(chooser.randrange(len(open_leases)))[0])
        version, ids = chooser.choice(VERSIONS), [chooser.randrange(2) for _ in range(chooser.randrange(1, 3 * SIZE))]
        lease = cache.start(version, ids)
        if not cache.pool.reserve(lease, len(ids) - lease.length):
            cache.pool.release(lease)
            continue
        while lease.length < len(ids):
            cache.compute(lease, ids, chooser.randrange(1, len(ids) - lease.length + 1))
        open_leases.append((lease, ids))
        for other, other_ids in open_leases:
            cache.check(other, other_ids)
    for lease, _ in open_leases:
        cache.pool.release(lease)
    assert cache.pool.available() == pages
    for version in VERSIONS:
        cache.pool.forget(version)
        assert cache.pool.outlook(version, [0, 1, 0, 1, 0])[0] == 0
    assert cache.pool.available() == pages


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    cache = Cache(4)
    for first in (1, 2):
        ids = [first] * 7
        lease = cache.start(BASE, ids)
        assert cache.pool.reserve(lease, 7)
        cache.compute(lease, ids, 7)
        cache.pool.release(lease)
    cache.pool.release(cache.start(BASE, [1] * 8))  # used again
    lease = cache.start(BASE, [3] * 3)
    assert cache.pool.reserve(lease, 3)
    assert cache.pool.outlook(BASE, [1] * 8)[0] == 7
    assert cache.pool.outlook(BASE, [2] * 8)[0] == 4  # its last page is gone, its first is not


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    cache = Cache(2)
    lease = cache.start(BASE, [1] * 5)
    assert not cache.pool.reserve(lease, 3 * SIZE)
    assert (cache.pool.available(), lease.pages) == (2, [])
