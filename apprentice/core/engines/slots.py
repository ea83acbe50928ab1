"""Who owns which slot of the KV cache: pages of token slots, arranged by token prefix, shared and evicted.

The cache is a pool of pages of `page_tokens` slots. Pages form one tree per policy version: the path from the root spells
the tokens whose keys and values the pages hold. A running sequence leases a path. Full pages are shared by any number of
sequences; a page that is being filled belongs to one. When a sequence ends its pages stay, and the least recently used
are taken when slots are needed. Versions never share a page, so a cache of one version cannot serve another.

Pure bookkeeping: knows no tensors and no models.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .protocol import PolicyVersion


@dataclass(slots=True, eq=False)
class Page:
    """`tokens` are those whose keys and values are computed; the page is full when it holds `page_tokens` of them."""

    index: int
    parent: Page | None
    tokens: list[int] = field(default_factory=list[int])
    children: list[Page] = field(default_factory=list["Page"])
    users: int = 0


@dataclass(slots=True)
class Lease:
    """A running sequence's hold on the cache. `length` tokens are computed; `cached` of them were found, not computed."""

    version: PolicyVersion
    pages: list[Page]
    length: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Copy the first `count` slots of page `source` to page `target` before the next step."""

    source: int
    target: int
    count: int


class SlotPool:
    def __init__(self, pages: int, page_tokens: int, on_take: Callable[[int], None]) -> None:
        """`on_take` is told the number of every page that starts a new life."""
        self._on_take = on_take
        self.pages = pages
        self.page_tokens = page_tokens
        self._free = list(range(pages))
        self._idle: OrderedDict[int, Page] = OrderedDict()
        """Pages that no sequence uses, least recently used first. A page is always released after its children, so the
        first one has no children."""
        self._roots: dict[PolicyVersion, Page] = {}

    def available(self) -> int:
        """Pages that can be had now, free ones and those that only keep old prefixes."""
        return len(self._free) + len(self._idle)

    def outlook(self, version: PolicyVersion, ids: Sequence[int]) -> tuple[int, int]:
        """How many tokens of `ids` are in the cache, and how many of the available pages `ids` and one more token would take.

        The last token never counts as cached: its logits must be computed.
        """
        full, partial, count = self._match(version, ids)
        cached = len(full) * self.page_tokens + (count if partial is not None else 0)
        in_use = sum(page.users > 0 for page in full)
        return cached, -(-(len(ids) + 1) // self.page_tokens) - in_use

    def lease(self, version: PolicyVersion, ids: Sequence[int], *, reuse: bool = True) -> tuple[Lease, SlotCopy | None]:
        """Start a sequence on the longest cached prefix of `ids`. Needs one available page beyond the ones it shares."""
        full, partial, count = self._match(version, ids) if reuse else ([], None, 0)
        lease = Lease(version, [])
        for page in full:
            self._use(lease, page)
        copy = None
        if partial is not None and partial.users == 0 and count == len(partial.tokens) < self.page_tokens:
            self._use(lease, partial)
        elif partial is not None and count:
            copy = self._copy_start(lease, partial, count)
        lease.length = lease.cached = sum(len(page.tokens) for page in lease.pages)
        return lease, copy

    def reserve(self, lease: Lease, tokens: int) -> bool:
        """Make sure that `tokens` more tokens fit. False, changing nothing, when there are not enough pages."""
        missing = -(-(lease.length + tokens) // self.page_tokens) - len(lease.pages)
        if missing > self.available():
            return False
        for _ in range(missing):
            self._append_page(lease)
        return True

    def slots(self, lease: Lease, tokens: int) -> list[int]:
        """Flat slot numbers of the next `tokens` tokens (reserved before)."""
        size = self.page_tokens
        return [lease.pages[at // size].index * size + at % size for at in range(lease.length, lease.length + tokens)]

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """The next tokens of the sequence are `ids`, and their keys and values are computed."""
        for token in ids:
            lease.pages[lease.length // self.page_tokens].tokens.append(token)
            lease.length += 1

    def release(self, lease: Lease) -> None:
        """End a sequence. Its computed prefix stays until its pages are needed."""
        for page in reversed(lease.pages):
            page.users -= 1
            if page.users == 0:
                if page.tokens:
                    self._idle[page.index] = page
                else:
                    self._drop(page)
        lease.pages = []

    def forget(self, version: PolicyVersion) -> None:
        """Free every page of a version that no sequence uses any more."""
        root = self._roots.pop(version, None)
        waiting = list(root.children) if root is not None else []
        while waiting:
            page = waiting.pop()
            waiting += page.children
            del self._idle[page.index]
            heapq.heappush(self._free, page.index)

    def _match(self, version: PolicyVersion, ids: Sequence[int]) -> tuple[list[Page], Page | None, int]:
        """Full pages that spell a prefix of `ids`, and the page with the longest start of what comes next."""
        size, at = self.page_tokens, 0
        node, full = self._root(version), list[Page]()
        while True:
            ahead = ids[at : min(at + size, len(ids) - 1)]
            best, count = None, 0
            for child in node.children:
                length = common_prefix(child.tokens, ahead)
                if length > count:
                    best, count = child, length
            if best is None or count < size:
                return full, best, count
            full.append(best)
            node, at = best, at + size

    def _root(self, version: PolicyVersion) -> Page:
        return self._roots.setdefault(version, Page(-1, None))

    def _use(self, lease: Lease, page: Page) -> None:
        self._idle.pop(page.index, None)
        page.users += 1
        lease.pages.append(page)

    def _copy_start(self, lease: Lease, source: Page, count: int) -> SlotCopy | None:
        held = self._idle.pop(source.index, None)  # so that it is not taken for the copy itself
        if self.available():
            page = self._append_page(lease)
            page.tokens.extend(source.tokens[:count])
            copy = SlotCopy(source.index, page.index, count)
        else:
            copy = None
        if held is not None:
            self._idle[source.index] = held
        return copy

    def _append_page(self, lease: Lease) -> Page:
        if not self._free:
            _, oldest = self._idle.popitem(last=False)
            self._drop(oldest)
        parent = lease.pages[-1] if lease.pages else self._root(lease.version)
        page = Page(heapq.heappop(self._free), parent)
        self._on_take(page.index)
        parent.children.append(page)
        self._use(lease, page)
        return page

    def _drop(self, page: Page) -> None:
        assert page.parent is not None  # a root is never dropped
        page.parent.children.remove(page)
        heapq.heappush(self._free, page.index)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return min(len(a), len(b))
