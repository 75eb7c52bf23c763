"""The server's metrics for Prometheus, under its own names and under those of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from layerskip.serving.requests import Piece, TextRequest
from layerskip.serving.scheduler import Serving

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_GAUGES = {  # by the attribute of `ServingStats`
    "rows": ("rows", "Texts in the batch."),
    "waiting": ("waiting", "Texts in the queue."),
    "memory": ("kv_cache_limit_bytes", "Limit of the KV caches of the batch."),
    "used": ("kv_cache_bytes", "KV caches of the batch."),
    "known_used": ("earlier_texts_bytes", "KV caches of earlier texts."),
    "drafts_used": ("draft_bytes", "Approximate data of draft sources."),
}
_COUNTED = {  # by our names: description, and vLLM's name
    "prompt_tokens": ("Tokens of prompts.", "prompt_tokens"),
    "cached_tokens": ("Tokens of prompts that were cached.", None),
    "generated_tokens": ("Tokens generated.", "generation_tokens"),
    "rounds": ("Rounds of texts.", None),
    "drafts": ("Rounds of texts that drafted.", "spec_decode_num_drafts"),
    "drafted_tokens": ("Tokens drafted.", "spec_decode_num_draft_tokens"),
    "accepted_tokens": ("Drafted tokens accepted.", "spec_decode_num_accepted_tokens"),
}


class Metrics:
    """Counters in a separate registry, and gauges that query the `Serving`.

    Args:
        name: name of the model, which labels every metric.
    """

    def __init__(self, serving: Serving, name: str) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._name = name
        common: dict[str, Any] = {"registry": self.registry, "namespace": "layerskip"}

        def counter(what: str, text: str, *labels: str) -> Counter:
            return Counter(what, text, ["model", *labels], **common)

        def seconds(what: str, text: str) -> Histogram:
            histogram = Histogram(what, text, ["model"], buckets=_SECONDS, unit="seconds", **common)
            return histogram.labels(name)

        for attribute, (what, text) in _GAUGES.items():
            gauge = Gauge(what, text, ["model"], **common).labels(name)
            gauge.set_function(partial(attrgetter(f"stats.{attribute}"), serving))
        self._requests = counter("requests", "Requests, by status.", "path", "status")
        self._texts = counter("texts", "Texts that ended, by reason.", "reason")
        self._sums: dict[str, list[Counter]] = {}
        for ours, (text, theirs) in _COUNTED.items():
            self._sums[ours] = [counter(ours, text).labels(name)]
            if theirs is not None:
                same = Counter(f"vllm:{theirs}", text, ["model_name"], registry=self.registry)
                self._sums[ours].append(same.labels(name))
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens accepted at each position of drafts.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._first = seconds("first_token", "From submission to the first token.")
        self._between = seconds("inter_token", "From one token to the next.")
        self._whole = seconds("text", "From submission to the last token.")

    @contextmanager
    def counting(self, path: str) -> Iterator[None]:
        """Count a request by its final status."""
        status = 500
        try:
            yield
            status = 200
        except Exception as error:
            status = getattr(error, "status", 500)
            raise
        finally:
            self._requests.labels(self._name, path, status).inc()

    def observe(self, task: TextRequest, piece: Piece) -> None:
        """Count a piece of a text; called on the thread that decodes."""
        counts, new = piece.counts, len(piece.tokens)
        for _ in range(new if piece.before else 0):
            self._between.observe((counts.seconds - piece.before) / new)
        self._add("generated_tokens", new)
        if piece.reason is None:
            return
        self._texts.labels(self._name, piece.reason).inc()
        self._add("prompt_tokens", task.num_prompt)
        self._add("cached_tokens", counts.cached)
        self._add("rounds", counts.rounds)
        self._add("drafts", sum(counts.accepted_of.values()))
        self._add("drafted_tokens", counts.drafted)
        self._add("accepted_tokens", counts.accepted)
        if piece.reason in ("stop", "length"):
            self._first.observe(counts.first)
            self._whole.observe(counts.seconds)
        for accepted, rounds in counts.accepted_of.items():
            for place in range(accepted):
                self._accepted_at.labels(self._name, place).inc(rounds)

    def _add(self, ours: str, count: int) -> None:
        for counter in self._sums[ours]:
            counter.inc(count)
