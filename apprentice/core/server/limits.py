"""The bounds of one server. Each is stated in the error that it causes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    max_body_bytes: int = 64 * 2**20
    """Larger bodies are refused while they are read."""
    running_per_engine: int = 256
    """Completions given to an engine at once; the others wait their turn here."""
    waiting_per_engine: int = 65_536
    """Completions waiting; more are refused with `QueueFull`."""
    queue_seconds: float = 3600.0
    """Longest wait for a turn. Train jobs pause sampling, so it must be longer than one of them."""
    default_max_tokens: int = 1024
    """Tokens of a reply whose request names no bound (less if the context ends first)."""
    renderers: int = 4
    """Threads that render and splice prompts."""
    heartbeat_seconds: float = 10.0
    """Between two comments on a silent stream of train events."""
    shutdown_seconds: float = 10.0
    """After a request to stop, open calls have so long to end; then they are aborted and kept."""
