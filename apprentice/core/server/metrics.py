"""Prometheus metrics of one server, in a registry of their own. Knows numbers; it is told them."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..records import Completion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, float("inf"))


class Metrics:
    """Counters and histograms of a server; gauges are read when they are asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("http_requests", "Requests by method, route and status", "method", "route", "status")
        self.completions = self._counter("completions", "Recorded completions by policy and finish reason", "policy", "finish")
        self.unparsed = self._counter("unparsed_completions", "Recorded completions that are not what was asked for")
        self.unattributed = self._counter("unattributed_calls", "Calls without a trajectory id: served, never trainable")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of recorded completions")
        self.sampled_tokens = self._counter("sampled_tokens", "Sampled tokens of recorded completions")
        self.queue_seconds = self._histogram("queue_seconds", "Wait for a turn to be sampled")
        self.sampling_seconds = self._histogram("sampling_seconds", "Sampling of one completion")

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"apprentice_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"apprentice_{name}", help_text, buckets=_SECONDS, registry=self.registry)

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A number that is read at every scrape."""
        Gauge(f"apprentice_{name}", help_text, registry=self.registry).set_function(read)

    def recorded(self, completion: Completion) -> None:
        self.completions.labels(completion.policy, completion.finish_reason.value).inc()
        self.prompt_tokens.inc(len(completion.prompt_ids))
        self.sampled_tokens.inc(len(completion.token_ids))
        self.queue_seconds.observe(completion.queued_seconds)
        self.sampling_seconds.observe(completion.sampling_seconds)
        if completion.parse_error is not None:
            self.unparsed.inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
