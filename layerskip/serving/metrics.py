"""What a server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from layerskip.serving.requests import Piece, TextRequest
from layerskip.serving.scheduler import Serving

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics(Collector):
    """Counters in a registry of their own, and gauges that ask the `Serving`."""

    def __init__(self, serving: Serving) -> None:
        self.registry = CollectorRegistry()
        common: dict[str, Any] = {"registry": self.registry, "namespace": "layerskip"}
        asked = ["path", "status"]
        self._requests = Counter("requests", "Requests, by status.", asked, **common)
        self._texts = Counter("texts", "Texts that ended, by why.", ["reason"], **common)
        self._prompt = Counter("prompt_tokens", "Tokens of prompts.", **common)
        self._known = Counter("known_tokens", "Those of them that were known.", **common)
        self._drafted = Counter("drafted_tokens", "Tokens drafted.", **common)
        self._accepted = Counter("accepted_tokens", "Drafted tokens that were emitted.", **common)
        self._first = Histogram(
            "first_token_seconds", "From submission to the first token.", buckets=_SECONDS, **common
        )
        self._whole = Histogram(
            "text_seconds", "From submission to the last token.", buckets=_SECONDS, **common
        )
        self._serving = serving
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gauges, for the registry."""
        stats = self._serving.stats
        for name, what in (
            ("rows", "Texts in the batch."),
            ("waiting", "Texts in the queue."),
            ("memory", "Bytes that keys and values of the batch may take."),
            ("used", "Bytes that they take."),
            ("known_used", "Bytes that keys and values of earlier texts take."),
            ("laws_used", "Bytes that laws to look up take, about."),
        ):
            yield GaugeMetricFamily(f"layerskip_{name}", what, getattr(stats, name))

    @contextmanager
    def counting(self, path: str) -> Iterator[None]:
        """Counts a request by the status that it comes to."""
        status = 500
        try:
            yield
            status = 200
        except Exception as error:
            status = getattr(error, "status", 500)
            raise
        finally:
            self._requests.labels(path, status).inc()

    def ended(self, task: TextRequest, piece: Piece) -> None:
        """Counts a text; on the thread that steps."""
        counts = piece.counts
        self._texts.labels(piece.reason).inc()
        self._prompt.inc(len(task.prompt))
        self._known.inc(counts.cached)
        self._drafted.inc(counts.drafted)
        self._accepted.inc(counts.accepted)
        if piece.reason in ("stop", "length"):
            self._first.observe(counts.first)
            self._whole.observe(counts.seconds)
