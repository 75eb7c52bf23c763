"""`Serving`: a queue, the batch that its requests join and leave, and their memory limit."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from layerskip.api.arguments import check_tokens
from layerskip.api.session import share
from layerskip.decoding.cached_texts import CachedTexts
from layerskip.decoding.sources.lookup import Automaton
from layerskip.model.opened_models import sublayers_of
from layerskip.serving.batch import ServingBatch
from layerskip.serving.requests import Piece, Refusal, TextRequest
from layerskip.serving.served_texts import Tell, Text, index_of
from layerskip.texts.tokens import plural

PIECE = 512
"""Prompt tokens that a step runs while others decode."""
_log = logging.getLogger(__name__)


@dataclass
class ServingStats:
    """The current state.

    Attributes:
        rows, waiting: requests in the batch, and in the queue.
        memory, used: limit and present bytes of the batch's keys and values.
        known_used: bytes of the keys and values of earlier texts.
        drafts_used: approximate bytes kept by draft sources, including those from a file.
    """

    rows: int = 0
    waiting: int = 0
    memory: int = 0
    used: int = 0
    known_used: int = 0
    drafts_used: int = 0


class Serving:
    """Decodes requests together, first come, first served.

    A text is the same as that of `layerskip.decode` with its seed alone, whatever else is running.

    Args:
        memory: maximum bytes of the batch's keys and values; by default half of the free memory.
        max_rows: maximum number of requests in the batch.
        max_queue: maximum number of waiting requests.
        max_tokens: maximum number of tokens of one request, including its prompt.
        session_memory: bytes for keys and values of earlier texts; by default a quarter of the free
            memory; 0: none. Encoder-decoders keep none, since theirs also depend on what was read.
        **settings: as for `LayerSkipDecoding`.

    Raises:
        ValueError: a setting or a model is not supported.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | None = None,
        max_rows: int = 16,
        max_queue: int = 128,
        max_tokens: int | None = None,
        session_memory: int | None = None,
        **settings: Any,
    ) -> None:
        if max_rows < 1 or max_queue < 1:
            raise ValueError(
                f"max_rows and max_queue must be at least 1, got {max_rows} and {max_queue}"
            )
        opened = sublayers_of(model, settings.get("execution", "auto"))
        free = share(opened.device)
        self.memory = 2 * free if memory is None else memory
        kept = free if session_memory is None else session_memory
        self._cached = CachedTexts(0 if opened.encoder else kept)
        self._batch = ServingBatch(
            model, seats=max_rows, max_tokens=max_tokens, cached=self._cached, settings=settings
        )
        self.max_queue = max_queue
        self._waiting: deque[Text] = deque()
        self._going: list[Text] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._dead = False  # whether the thread ended with an error

    @property
    def max_tokens(self) -> int:
        return self._batch.max_tokens

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def stats(self) -> ServingStats:
        passes = self._batch.passes
        return ServingStats(
            rows=len(self._going),
            waiting=len(self._waiting),
            memory=self.memory,
            used=passes.nbytes(passes.cache.rows, passes.slots, passes.encoder_length),
            known_used=self._cached.nbytes,
            drafts_used=sum(state.nbytes for state in passes.states),
        )

    def submit(self, request: TextRequest, tell: Tell) -> Text:
        """Queue one text, as in `submit_all`."""
        return self.submit_all([(request, tell)])[0]

    def submit_all(self, requests: Sequence[tuple[TextRequest, Tell]]) -> list[Text]:
        """Queue texts, all of them or none; from any thread.

        Args:
            requests: each with a function that is called in order on the thread that decodes and
                must not block; its last piece has a reason.

        Raises:
            Refusal: the queue would exceed its maximum, or decoding has ended with an error.
            ValueError: one of the texts can never be decoded here.
        """
        batch, texts, indexes = self._batch, list[Text](), dict[int, Automaton]()
        given = [tokens for task, _ in requests for tokens in (task.prompt, task.predicted)]
        for tokens in {id(each): each for each in given}.values():  # many texts may share a list
            check_tokens(batch.model.model, torch.tensor([*tokens], dtype=torch.long))
        for request, tell in requests:
            if batch.model.encoder is not bool(request.encoder_length):
                raise ValueError(
                    "a text needs encoder states where, and only where, the model is "
                    "an encoder-decoder; see layerskip.api.arguments.read_text"
                )
            text = Text(request, batch.model.model, batch.max_tokens, batch.longest, tell)
            longest = 0 if request.pictures is None else request.pictures.longest
            if longest > batch.passes.piece:
                raise ValueError(
                    f"a picture of {longest} tokens must be read in one pass, but beside other "
                    f"texts a pass reads at most {batch.passes.piece}; use layerskip.generate"
                )
            needed = batch.passes.nbytes(1, text.slots, request.encoder_length)
            if needed > self.memory:
                raise ValueError(
                    f"the KV cache of {text.slots} tokens takes {needed:,} bytes, but may take "
                    f"{self.memory:,}; shorten the prompt, lower max_new_tokens, or give more "
                    "memory"
                )
            if predicted := request.predicted:  # index it here, not on the thread that decodes
                if id(predicted) not in indexes:
                    indexes[id(predicted)] = index_of(predicted)
                text.index = indexes[id(predicted)]
            texts.append(text)
        with self._changed:
            if self._dead:
                raise Refusal(503, "this server's decoding has ended with an error; restart it")
            self.check_room(len(texts))
            self._waiting += texts
            self._changed.notify_all()
        return texts

    def check_room(self, count: int) -> None:
        """Refuse texts beyond the maximum of the queue, before they cost anything.

        Raises:
            Refusal: the queue would exceed its maximum.
        """
        waiting = len(self._waiting)
        if waiting + count > self.max_queue:
            raise Refusal(
                429,
                f"the queue holds at most {plural(self.max_queue, 'text')}: {waiting} are waiting, "
                f"and {count} more were requested; try again later, or request fewer at once",
                code="queue_full",
            )

    def cancel(self, text: Text) -> None:
        """End a text; from any thread. Its last piece comes with the next step."""
        with self._changed:
            text.cancelled = True
            self._changed.notify_all()

    def step(self) -> bool:
        """Run pieces of prompts, and a round of the texts that have begun; False: nothing to do.

        If a pass fails, it ends all requests in the batch; those that wait are decoded next.
        """
        with torch.no_grad():
            try:
                self._drop_cancelled()
                if not (self._going or self._waiting):
                    return False
                self._prefill()
                if self._batch.texts:
                    self._batch.round()
                self._tell()
            except Exception as error:
                _log.exception("a pass has failed")
                self._batch.clear()
                for text in self._going:
                    text.row = -1
                    text.fail(error)
                self._tell()
        return True

    def start(self) -> None:
        """Decode on a new thread, which sleeps while there is nothing to do."""
        if self._thread is not None:
            raise ValueError("serving has been started already; stop it first")
        self._stopping = self._dead = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            while not self._stopping:
                if not self.step():
                    with self._changed:
                        self._changed.wait_for(lambda: bool(self._waiting) or self._stopping)
        except BaseException as error:
            _log.exception("the decoder thread stopped")
            with self._changed:
                self._dead = True
                self._going += self._waiting
                self._waiting.clear()
            for text in self._going:
                text.fail(error)
                self._say(text)
            self._going.clear()

    def stop(self) -> None:
        """End the thread; all tasks are cancelled."""
        thread, self._thread = self._thread, None
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if thread is not None:
            thread.join()
        with self._changed:
            for text in (*self._going, *self._waiting):
                text.cancelled = True
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        with self._changed:
            self._going += [text for text in self._waiting if text.cancelled]
            self._waiting = deque(text for text in self._waiting if not text.cancelled)
        for text in self._going:
            if text.cancelled:
                text.reason = "cancelled"
        self._tell()

    def _prefill(self) -> None:
        """Let waiting requests join while there is room, and run pieces of their prompts.

        The oldest one gets half of a step's tokens, so that it is never left behind. The rest goes
        to the shortest ones: these finish soon, several in one pass. Of prompts that have most of
        their tokens in common, one is run and then known to the others.
        """
        batch, left = self._batch, PIECE
        self._join()
        while left > 0 and batch.joining:
            if left == PIECE and len(batch.joining) > 1:
                text = next(each for each in self._going if each in batch.joining)
                most = left // 2
            else:
                text, most = min(batch.joining, key=batch.left), left
            left -= batch.prefill(text, most, left)
            self._tell()
            self._join()

    def _join(self) -> None:
        batch = self._batch
        while len(self._going) < batch.num_seats:
            with self._changed:
                if not self._waiting:
                    return
                shape = batch.shape(self._waiting[0], self.memory)
                if shape is None:
                    return
                text = self._waiting.popleft()
            text.counts.queued = time.perf_counter() - text.submitted
            self._going.append(text)
            batch.join(text, shape)

    def _tell(self) -> None:
        for text in [*self._going]:
            if text.reason is not None:
                self._batch.leave(text)
                self._going.remove(text)
            if text.piece.tokens or text.reason is not None:
                self._say(text)

    def _say(self, text: Text) -> None:
        piece, text.piece, counts = text.piece, Piece(), text.counts
        piece.reason, piece.before = text.reason, counts.seconds
        if piece.tokens:
            counts.seconds = time.perf_counter() - text.submitted
            counts.first = counts.first or counts.seconds
        piece.counts = replace(counts, accepted_of=dict(counts.accepted_of))
        try:
            text.tell(piece)
        except Exception:
            _log.exception("a listener has failed; its text is cancelled")
            text.cancelled = True
