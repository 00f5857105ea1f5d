"""The server's Prometheus metrics; those of several workers are added up."""

import os
import re
from collections.abc import Collection, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.routing import compile_path

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable with the folder through which workers share their metrics."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one server process."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._answers: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._routes: dict[str, re.Pattern[str]] = {}
        count = partial(Counter, namespace="vitascope", registry=registry)
        gauge = partial(Gauge, namespace="vitascope", registry=registry)
        histogram = partial(Histogram, namespace="vitascope", registry=registry)
        times = partial(histogram, buckets=SECONDS)
        self.requests = count("requests", "Requests answered, by route and status.", ["route", "status"])
        about = "From a request's headers to its response."
        self.request_seconds = times("request_seconds", about, ["route"])
        about = "Requests admitted and not answered."
        self.in_flight = gauge("requests_in_flight", about, multiprocess_mode="livesum")
        self.refused = count("refused", "Requests answered with 429.")
        self.expired = count("expired", "Requests whose deadline passed, by stage.", ["stage"])
        self.abandoned = count("abandoned", "Requests whose client left before the response.")
        self.computed = count("computed", "Items that the model computed.", ["work"])
        about, labels = (
            "Pictures by verdict: known, ambiguous, unfamiliar or unchecked.",
            ["model", "verdict"],
        )
        self.verdicts = count("verdicts", about, labels)
        about = "Their shares among the validation images, at the default rates."
        self.usual = gauge("usual_verdicts", about, labels, multiprocess_mode="livemax")
        self.batch_items = histogram("batch_items", "Items per batch.", ["work"], buckets=BATCHES)
        self.queue_seconds = times("queue_seconds", "Time of an item in the queue.", ["work"])
        self.model_seconds = times("model_seconds", "Time of a batch in the model.", ["work"])
        about, labels = "1, labelled by the served model.", ["name", "architecture", "digest"]
        self.model = gauge("model_info", about, labels, multiprocess_mode="livemax")
        if SHARED_FOLDER not in os.environ:
            ProcessCollector(registry=registry)

    def observe_batch(self, work: str, queue_seconds: Sequence[float], model_seconds: float) -> None:
        """Record a computed batch."""
        self.computed.labels(work).inc(len(queue_seconds))
        self.batch_items.labels(work).observe(len(queue_seconds))
        self.model_seconds.labels(work).observe(model_seconds)
        for seconds in queue_seconds:
            self.queue_seconds.labels(work).observe(seconds)

    def name_routes(self, paths: Collection[str]) -> None:
        """Count requests by these paths, with parameters in braces; all others are `other`."""
        by_length = sorted(paths, key=len, reverse=True)  # {name}:predict comes before {name}
        self._routes = {path: compile_path(path)[0] for path in by_length}

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        """Record an answered request."""
        route = path
        if path not in self._routes:
            matches = (route for route, pattern in self._routes.items() if pattern.match(path))
            route = next(matches, "other")
        counts = self._answers.get((route, status))
        if counts is None:  # finding a metric by its labels takes longer than counting
            counts = self.requests.labels(route, str(status)), self.request_seconds.labels(route)
            self._answers[route, status] = counts
        counts[0].inc()
        counts[1].observe(seconds)
        if status == 429:
            self.refused.inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if SHARED_FOLDER not in os.environ:
            return generate_latest(self._registry)
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        return generate_latest(together)
