"""How the C library keeps large blocks of memory while a train job runs.

Outside of jobs nothing is changed. In a job a freed block goes back to the system at once, so memory is what activations
take; or, where a pass has memory to spare, blocks stay for the next tensor. A step is then a third faster, because it
touches no new pages, but takes about 2.4 times its activations: glibc cannot give a freed aligned block to the next of
its size (`activation_memory.HEAP_SPREAD`). Does nothing where the C library has no such calls.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAPPED_BLOCK = 2**18
"""Bytes from which a block is mapped by itself, unless blocks are recycled."""
_DEFAULT_MAPPED_BLOCK = 2**25
"""Where glibc's own threshold ends up."""
_NEVER = 2**30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _c_library() -> Any:
    library: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


class _JobHeap:
    def __init__(self) -> None:
        self._library = _c_library()
        self._in_job = self._recycling = False

    @contextmanager
    def job(self) -> Iterator[None]:
        if self._library is None:
            yield
            return
        self._in_job = True
        self._set(MAPPED_BLOCK, 2 * _DEFAULT_MAPPED_BLOCK)
        try:
            yield
        finally:
            self._in_job = self._recycling = False
            self._set(_DEFAULT_MAPPED_BLOCK, 2 * _DEFAULT_MAPPED_BLOCK)
            self._library.malloc_trim(0)

    def recycle(self, wanted: bool) -> None:
        if not self._in_job or wanted == self._recycling:
            return
        self._recycling = wanted
        if wanted:
            self._set(_NEVER, 2**31 - 1)
        else:
            self._set(MAPPED_BLOCK, 2 * _DEFAULT_MAPPED_BLOCK)
            self._library.malloc_trim(0)

    def _set(self, mapped: int, trim: int) -> None:
        self._library.mallopt(_M_MMAP_THRESHOLD, mapped)
        self._library.mallopt(_M_TRIM_THRESHOLD, trim)


_heap = _JobHeap()

job_heap = _heap.job
"""Context manager: inside, large blocks go back when they are freed; at the end all that is free does. One job at a time."""
recycle_blocks = _heap.recycle
"""Inside a job: from now on the heap keeps freed blocks, or gives them back. Does nothing outside."""
