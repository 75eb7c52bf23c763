"""A `Serving` without a batch: each task decoded alone, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from layerskip.decoding.sources.lookup import Lookup
from layerskip.generation import decode
from layerskip.serving.tasks import Counts, Piece, QueueFull, Task


class LoneServing:
    def __init__(self, model: Any, *, max_queue: int = 128, **settings: Any) -> None:
        self.model, self.max_queue, self.settings = model, max_queue, settings
        self.settings.pop("max_tokens", None)
        self.stats = SimpleNamespace(rows=0, waiting=0)
        self._lock, self._one = threading.Lock(), threading.Lock()

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def submit(self, task: Task, tell: Callable[[Piece], None]) -> threading.Event:
        with self._lock:
            if self.stats.waiting >= self.max_queue:
                raise QueueFull(f"{self.max_queue} texts wait already; try again later")
            self.stats.waiting += 1
        ticket = threading.Event()
        threading.Thread(target=self._run, args=(task, tell, ticket), daemon=True).start()
        return ticket

    def cancel(self, ticket: threading.Event) -> None:
        ticket.set()

    def _run(self, task: Task, tell: Callable[[Piece], None], ticket: threading.Event) -> None:
        began, counts = time.monotonic(), Counts()
        with self._one:
            with self._lock:
                self.stats.waiting -= 1
                self.stats.rows += 1
            reason: Any = "cancelled" if ticket.is_set() else None
            for tokens, logprobs in self._rounds(task, counts) if reason is None else ():
                counts.first = counts.first or time.monotonic() - began
                counts.seconds = time.monotonic() - began
                reason = "cancelled" if ticket.is_set() else self._reason(task, tokens)
                tell(Piece((tokens[-1],), logprobs, None, counts=counts))
                if reason is not None:
                    break
            with self._lock:
                self.stats.rows -= 1
            tell(Piece(reason=reason or "length", counts=counts))

    def _rounds(self, task: Task, counts: Counts) -> Any:
        ids, tokens = torch.tensor([list(task.prompt)]), []
        law: dict[str, Any] = {"do_sample": task.do_sample, "logits_processor": task.processors}
        if task.do_sample:
            law |= {name: getattr(task, name) for name in ("temperature", "top_k", "top_p")}
            law["seeds"] = [task.seed]
        predicted = {"lookup": Lookup([list(task.predicted)])} if task.predicted else {}
        keep = task.top_logprobs is not None
        settings = {**self.settings, **law, **predicted, "keep_scores": keep}
        for round_ in decode(self.model, ids, max_new_tokens=task.max_new_tokens, **settings):
            accepted = len(round_.tokens[0]) - 1
            counts.accepted += accepted
            counts.drafted += accepted
            counts.predicted_accepted += accepted if predicted else 0
            counts.predicted += accepted if predicted else 0
            for number, token in enumerate(round_.tokens[0]):
                tokens.append(token)
                logprobs: tuple[dict[int, float], ...] = ()
                if keep:
                    law_ = round_.logits[0][number].float().log_softmax(-1)  # (V,)
                    top = law_.topk(task.top_logprobs or 1).indices.tolist()
                    logprobs = ({each: float(law_[each]) for each in [*top, token]},)
                yield list(task.prompt) + tokens, logprobs

    def _reason(self, task: Task, tokens: list[int]) -> Any:
        if tokens[-1] == self.model.generation_config.eos_token_id:
            return "stop"
        return "stop" if task.stop is not None and task.stop(0, torch.tensor([tokens])) else None
