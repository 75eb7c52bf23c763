"""The target's texts, along which any draft can be replayed.

Prompts are decoded once by the target alone: drafts do not change the texts, or, under the
rejection rule, their law. Then one pass over each whole text gives the target's keys and values,
and its states after every layer.
Shapes: N places, P of them in all texts, L layers, T tokens of a text, H hidden width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from layerskip.api.arguments import check_tokens
from layerskip.cache.rows import RowCache
from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law, softmax_law
from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.errors import LayerskipError
from layerskip.model.opened_model import OpenedModel
from layerskip.model.opened_models import opened_of
from layerskip.replay.token_draws import NOTHING, scores_at

DRAFT_LENGTH = 8
"""Default number of tokens that a trace allows drafts to look ahead."""

ROWS = 16  # texts decoded together
NOISE = 2**27  # maximum number of noise values to keep
LOGITS = 2**24  # maximum size of a chunk of logits (but a few places always stay together)


@dataclass(frozen=True)
class TraceText:
    """One prompt and the target's continuation.

    Attributes:
        tokens: prompt, emitted tokens, then those that only serve as context, (T,) int64.
        prompt: number of prompt tokens, so that place `prompt` holds the first emitted one.
        emitted: number of tokens that the request emits, including EOS.
        key: of the text's noise stream.
        likelihoods: under the rejection rule, the probability of the token after each emitted one
            under the target's law, (T - prompt,) float32; otherwise NaN.
        states: hidden states after every layer, from place `prompt` on, (L, T - prompt, H).
    """

    number: int
    tokens: Tensor
    prompt: int
    emitted: int
    key: int
    likelihoods: Tensor
    states: Tensor

    @property
    def starts(self) -> int:
        """Number of emitted tokens from which a round may start: all but the last."""
        return self.emitted - 1

    @property
    def following(self) -> Tensor:
        """The token after each emitted one, (T - prompt,); `NOTHING` after the last known."""
        return torch.cat([self.tokens[self.prompt + 1 :], torch.tensor([NOTHING])])


@dataclass(frozen=True)
class Trace:
    """Texts of one model under one law, ready for replays.

    Attributes:
        law: the law from which tokens are drawn, for single rows.
        cache: the target's keys and values of all their tokens, one row each; slot equals place.
        eos: tokens that end a text, and a draft.
        draft_length: maximum draft length for which all places are known.
        rejection: whether drafts are accepted by the rejection rule instead of by shared noise.
    """

    model: OpenedModel
    law: Law
    texts: tuple[TraceText, ...]
    cache: RowCache
    eos: frozenset[int]
    draft_length: int
    max_new_tokens: int
    rejection: bool = False
    _noise: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    @property
    def starts(self) -> int:
        """Number of places from which a round may start, over all texts."""
        return sum(text.starts for text in self.texts)

    @property
    def context(self) -> int:
        """Mean number of tokens before the middle of a text's new ones."""
        spans = [text.prompt + text.emitted / 2 for text in self.texts]
        return round(sum(spans) / len(spans))

    @cached_property
    def offsets(self) -> list[int]:
        """For each text, the number of the P places in earlier texts."""
        return [0, *accumulate(len(text.tokens) - text.prompt for text in self.texts)][:-1]

    @cached_property
    def following(self) -> Tensor:
        """The token after each place from a text's first emitted one on, all texts, (P,)."""
        return torch.cat([text.following for text in self.texts])

    @cached_property
    def likelihoods(self) -> Tensor:
        """The likelihood of each of `following`, (P,)."""
        return torch.cat([text.likelihoods for text in self.texts])

    def rotary(self, slots: int) -> Any:
        """Angles of `slots` places, for drafts of any text."""
        ends = (max(len(t.tokens), t.prompt + self.max_new_tokens) for t in self.texts)
        return self.model.rotary(slots, min(slots, max(ends)))

    def noise(self, keys: Sequence[int], places: Sequence[int]) -> Tensor:
        """Gumbel noise at places of texts, (N, V) float32; kept, since all drafts use the same.

        Args:
            keys, places: of the texts' noise streams, and of the tokens drawn, N each.
        """
        wanted, vocabulary = [*zip(keys, places, strict=True)], self.model.vocabulary
        made = self._noise
        missing = [pair for pair in dict.fromkeys(wanted) if pair not in made]
        if missing:
            if (len(made) + len(missing)) * vocabulary > NOISE:
                made.clear()
                missing = [*dict.fromkeys(wanted)]
            streams, drawn = zip(*missing, strict=True)
            new = gumbel_noise(streams, drawn, vocabulary, device=self.model.device)
            made |= zip(missing, new, strict=True)
        return torch.stack([made[pair] for pair in wanted])

    @cached_property
    def states(self) -> Tensor:
        """The target's hidden states at all places, (P, H)."""
        return torch.cat([text.states[-1] for text in self.texts])


class NothingToDraft(LayerskipError):
    """Every text of a trace ends with its first token."""


@torch.no_grad()
def take_trace(
    model: Any,
    prompts: Sequence[Tensor],
    *,
    max_new_tokens: int,
    law: Law | None = None,
    seeds: Sequence[int] | None = None,
    eos: frozenset[int] = frozenset(),
    draft_length: int = DRAFT_LENGTH,
    acceptance: str = "coupled",
    progress: Callable[[str, float], None] = lambda _what, _share: None,
) -> Trace:
    """Decode prompts with the target, and read its keys, values and states along the texts.

    Args:
        model: a causal language model, or an `OpenedModel`.
        prompts: token ids without pads, (T,) or (1, T) each.
        max_new_tokens: maximum number of new tokens per text; places that only serve as context
            are added, as far as the model's positions reach.
        law: the processors, and whether to sample; greedy by default. Processors see one row
            without pads.
        seeds: one per text, like `seeds=` in decoding; 0, 1, 2, ... by default.
        eos: tokens that end a text.
        draft_length: maximum number of tokens that a replay drafts from one start.
        acceptance: of drafts in sampling, "coupled" or "rejection"; the texts are the same.
        progress: called after every round with the current activity and the completed share; may
            end the trace by an error.

    Raises:
        ValueError: an argument is out of range, or no text has a token to draft (NothingToDraft).
    """
    opened = opened_of(model)
    rows = [prompt.flatten().to(opened.device) for prompt in prompts]
    check_prompts(opened, rows, max_new_tokens)
    seeds = range(len(rows)) if seeds is None else seeds
    if len(seeds) != len(rows):
        raise ValueError(f"seeds must hold one per prompt, {len(rows)}; got {len(seeds)}")
    if max_new_tokens < 2 or draft_length < 1:
        raise ValueError(
            "a trace needs max_new_tokens of at least 2 and draft_length of at least 1, got "
            f"{max_new_tokens} and {draft_length}"
        )
    if acceptance not in ("coupled", "rejection"):
        raise ValueError(f"acceptance must be 'coupled' or 'rejection', got {acceptance!r}")
    law = law or Law(do_sample=False, rows=1)
    rejection = law.do_sample and acceptance == "rejection"
    keys = [stream_key(seed) for seed in seeds]
    # Processors that read the tokens so far would read pads, so such texts are decoded singly.
    together = 1 if law.reads_history else ROWS
    decoded: list[list[int]] = []
    for first in range(0, len(rows), together):
        during = partial(progress, "texts of the target", first / len(rows))
        batch, batch_keys = rows[first : first + together], keys[first : first + together]
        room = opened.max_positions - max(map(len, batch)) - max_new_tokens
        longest = max_new_tokens + max(0, min(draft_length, room))
        decoded += _decode(opened, batch, batch_keys, law, eos, longest, during)
    whole = [torch.cat([row, row.new_tensor(new)]) for row, new in zip(rows, decoded, strict=True)]
    cache = opened.new_cache(len(rows), max(map(len, whole)))
    texts = []
    for number, (tokens, prompt) in enumerate(zip(whole, map(len, rows), strict=True)):
        cache.place([0], len(tokens), rows=range(number, number + 1))
        states = _states(opened, cache, tokens, prompt)
        likelihoods = torch.full((len(tokens) - prompt,), float("nan"))
        if rejection:
            likelihoods = _likelihoods(opened, law, states[-1:], tokens, prompt)
        emitted = min(len(tokens) - prompt, max_new_tokens)
        text = TraceText(number, tokens.cpu(), prompt, emitted, keys[number], likelihoods, states)
        texts.append(text)
    trace = Trace(opened, law, tuple(texts), cache, eos, draft_length, max_new_tokens, rejection)
    if trace.starts == 0:
        raise NothingToDraft(
            "every text of the trace ends with its first token; give other prompts"
        )
    return trace


def check_prompts(opened: OpenedModel, prompts: Sequence[Tensor], max_new_tokens: int) -> None:
    """Raise a ValueError for prompts, (T,) or (1, T) each, whose texts cannot be decoded."""
    lengths = [prompt.numel() for prompt in prompts]
    if not lengths or not min(lengths):
        raise ValueError(f"give prompts of at least one token each, got {len(prompts)} prompts")
    for prompt in prompts:
        check_tokens(opened.model, prompt)
    opened.check_lengths(lengths, max(lengths) + max_new_tokens)


def _decode(
    model: OpenedModel,
    prompts: list[Tensor],
    keys: Sequence[int],
    law: Law,
    eos: frozenset[int],
    max_new_tokens: int,
    during: Callable[[], None],
) -> list[list[int]]:
    """New tokens of each prompt, by plain decoding of all of them together."""
    masks = list(map(torch.ones_like, prompts))
    request = Request(
        input_ids=pad_sequence(prompts, batch_first=True, padding_side="left"),
        attention_mask=pad_sequence(masks, batch_first=True, padding_side="left"),
        max_new_tokens=max_new_tokens,
        law=Law(law.processors, do_sample=law.do_sample, rows=len(prompts)),
        keys=keys,
        eos=eos,
    )
    decoder = Decoder(model, SkipConfig(), Fixed(), request, max_draft_length=0)
    for _ in decoder.rounds():
        during()
    return decoder.emitted


def _states(model: OpenedModel, cache: RowCache, tokens: Tensor, prompt: int) -> Tensor:
    """Run a text (T,) through the model; its states after every layer, (L, T - prompt, H)."""
    hidden, step = model.feed(tokens[None], cache, model.rotary(len(tokens), len(tokens)))
    after = []
    for layer in range(model.num_layers):
        hidden = model.run(hidden, step, (2 * layer, 2 * layer + 1))
        after.append(hidden[0, prompt:].to(model.device))  # (T - prompt, H)
    return torch.stack(after)


def _likelihoods(
    model: OpenedModel, law: Law, states: Tensor, tokens: Tensor, prompt: int
) -> Tensor:
    """The probability of each token of a text (T,) after the first new one, from the last states
    (1, T - prompt, H) before it, (T - prompt,); that of the last one is meaningless."""
    following = F.pad(tokens[prompt + 1 :], (0, 1))  # (T - prompt,)
    likelihoods = []
    for places in chunks(len(following), model.vocabulary):
        seen = range(prompt + places.start + 1, prompt + places.stop + 1)
        histories = [tokens[:length] for length in seen] if law.reads_history else None
        p = softmax_law(scores_at(law, model.logits(states[:, places])[0], histories))  # (N, V)
        likelihoods.append(p.gather(1, following[places, None])[:, 0].cpu())
    return torch.cat(likelihoods)


def chunks(places: int, vocabulary: int) -> Iterator[slice]:
    """Divide places into chunks whose logits take little memory."""
    size = max(16, LOGITS // vocabulary)
    return (slice(first, min(first + size, places)) for first in range(0, places, size))
