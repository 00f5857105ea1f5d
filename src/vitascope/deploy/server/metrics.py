"""What the server counts and times, for Prometheus; of several workers, added up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

if TYPE_CHECKING:
    from vitascope.deploy.predict.engine import Engine

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that tells prometheus_client where workers keep their numbers for each other."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The numbers of one server process, each server with its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "vitascope_requests",
            "Requests answered, by route and status.",
            ["route", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "vitascope_request_seconds",
            "From a request's headers to its answer.",
            ["route"],
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "vitascope_requests_in_flight",
            "Requests let in and not answered.",
            multiprocess_mode="livesum",
            registry=registry,
        )
        self.refused = Counter("vitascope_refused", "Requests answered with 429.", registry=registry)
        self.expired = Counter(
            "vitascope_expired",
            "Pictures whose deadline passed, by where they were.",
            ["stage"],
            registry=registry,
        )
        self.abandoned = Counter(
            "vitascope_abandoned",
            "Requests whose client closed the connection before the answer.",
            registry=registry,
        )
        self.computed = Counter(
            "vitascope_computed", "Items that the model computed.", ["work"], registry=registry
        )
        self.batch_items = Histogram(
            "vitascope_batch_items", "Items in a batch.", ["work"], buckets=BATCHES, registry=registry
        )
        self.queue_seconds = Histogram(
            "vitascope_queue_seconds",
            "What an item waited in the queue.",
            ["work"],
            buckets=SECONDS,
            registry=registry,
        )
        self.model_seconds = Histogram(
            "vitascope_model_seconds",
            "What a batch was computed for.",
            ["work"],
            buckets=SECONDS,
            registry=registry,
        )
        self.model = Gauge(
            "vitascope_model_info",
            "1, labelled by the model that is served.",
            ["name", "architecture", "digest"],
            multiprocess_mode="livemax",
            registry=registry,
        )
        self._answers: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        if SHARED_FOLDER not in os.environ:
            ProcessCollector(registry=self._registry)

    def serves(self, engine: Engine) -> None:
        """The model is loaded; its digest, which takes a moment, is computed here."""
        self.model.labels(engine.name, engine.architecture, engine.digest).set(1)

    def batch(self, work: str, items: int, queue_seconds: Sequence[float], model_seconds: float) -> None:
        """A batch was computed."""
        self.computed.labels(work).inc(items)
        self.batch_items.labels(work).observe(items)
        self.model_seconds.labels(work).observe(model_seconds)
        waited = self.queue_seconds.labels(work)
        for seconds in queue_seconds:
            waited.observe(seconds)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        counts = self._answers.get((route, status))
        if counts is None:  # finding a metric by its labels takes longer than counting
            counts = self.requests.labels(route, str(status)), self.request_seconds.labels(route)
            self._answers[route, status] = counts
        counts[0].inc()
        counts[1].observe(seconds)

    def text(self) -> bytes:
        """All numbers in Prometheus' text format, of all workers together."""
        if SHARED_FOLDER not in os.environ:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
