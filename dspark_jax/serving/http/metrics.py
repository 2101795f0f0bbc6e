"""Metrics for Prometheus, in a registry of their own: requests, latencies, drafts by position, the engine's counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dspark_jax.decoding.engine import Engine
from dspark_jax.decoding.trace import RoundTrace

FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
REQUEST = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST

# counts of the engine: metric, what it is, field of the statistics
_COUNTS = (
    ("dspark_prompt_tokens", "Prompt tokens taken in", "prompt_tokens"),
    ("dspark_generated_tokens", "Tokens generated", "tokens"),
    ("dspark_rounds", "Decoding rounds of the batch", "rounds"),
    ("dspark_drafted_rounds", "Decoding rounds with a draft", "drafted_rounds"),
    ("dspark_request_rounds", "Rounds summed over the requests in them", "request_rounds"),
    ("dspark_verified_rows", "Rows that the target verified for requests", "rows"),
    ("dspark_padding_rows", "Rows of verify buckets that were padding", "padded_rows"),
    ("dspark_resizes", "Changes of the number of slots or of the caches' capacity", "resizes"),
)
_SECONDS = {"prefill": "prefill_seconds", "rounds": "rounds_seconds", "host": "host_seconds"}


class Metrics:
    """What the server counts itself, and the registry with all."""

    def __init__(self, engine: Engine) -> None:
        self.registry = registry = CollectorRegistry()
        labels = ("method", "path", "status")
        self._requests = Counter("dspark_http_requests", "HTTP requests answered", labels, registry=registry)
        about = "Seconds of a request, its stream included"
        self._seconds = Histogram("dspark_http_request_seconds", about, ("path",), registry=registry, buckets=REQUEST)
        about = "Seconds from a request to its first token"
        self._first = Histogram("dspark_time_to_first_token_seconds", about, registry=registry, buckets=FIRST_TOKEN)
        about = "Seconds between tokens; those that come together share the time"
        self._between = Histogram("dspark_inter_token_seconds", about, registry=registry, buckets=BETWEEN_TOKENS)
        self._drafts = Drafts(engine.generator.block_size)
        registry.register(self._drafts)
        registry.register(EngineCounts(engine))

    def answered(self, method: str, path: str, status: int, seconds: float) -> None:
        """A request has its answer."""
        self._requests.labels(method, path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request got its first token."""
        self._first.observe(seconds)

    def more_tokens(self, count: int, seconds: float) -> None:
        """So many tokens came after a time."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def rounds(self, traces: Iterable[RoundTrace]) -> None:
        """Rounds of a request."""
        for trace in traces:
            self._drafts.add(trace.verified, trace.accepted)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)


class Drafts(Collector):
    """Drafts that were verified and accepted, by their position in the block (from 1)."""

    def __init__(self, positions: int) -> None:
        self.verified, self.accepted = [0] * positions, [0] * positions

    def add(self, verified: int, accepted: int) -> None:
        """A round verified and accepted so many drafts."""
        for counts, count in ((self.verified, verified), (self.accepted, accepted)):
            for position in range(count):
                counts[position] += 1

    def collect(self) -> Iterator[Metric]:
        """The families, for the registry."""
        yield _by_position("dspark_verified_drafts", "Drafts that the target looked at, by position", self.verified)
        yield _by_position("dspark_accepted_drafts", "Drafts that were committed, by position", self.accepted)


def _by_position(name: str, about: str, counts: Sequence[int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=("position",))
    for position, count in enumerate(counts, start=1):
        family.add_metric([str(position)], count)
    return family


class EngineCounts(Collector):
    """The engine's statistics and its load."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """The families, for the registry."""
        did: Any = self._engine.batch.statistics
        for name, about, source in _COUNTS:
            yield CounterMetricFamily(name, about, getattr(did, source))
        ended = CounterMetricFamily("dspark_requests_ended", "Requests that ended, by how", labels=("how",))
        ended.add_metric(["completed"], did.completed)
        ended.add_metric(["cancelled"], did.cancelled)
        yield ended
        seconds = CounterMetricFamily("dspark_engine_seconds", "Seconds of the engine, by what for", labels=("what",))
        for what, source in _SECONDS.items():
            seconds.add_metric([what], getattr(did, source))
        yield seconds
        buckets = CounterMetricFamily("dspark_rounds_by_bucket", "Rounds by rows of their bucket", labels=("rows",))
        for rows, count in sorted(dict(did.by_bucket).items()):
            buckets.add_metric([str(rows)], count)
        yield buckets
        active, waiting = self._engine.load
        requests, busy = max(did.request_rounds, 1), did.busy_seconds
        gauges = (
            ("dspark_requests_active", "Requests in slots", active),
            ("dspark_requests_waiting", "Requests that wait for a slot", waiting),
            ("dspark_tokens_per_second", "Tokens generated per second at work", did.tokens / busy if busy else 0),
            ("dspark_accepted_length", "Tokens of a request and round", (did.tokens - did.first_tokens) / requests),
            ("dspark_verify_budget", "Rows of a request and round, anchors included", did.rows / requests),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(name, about, value)
