"""The losslessness check of a model on this machine, in token ids.

Greedy text against plain decoding and against the library's, coupled samples against plain
decoding, emitted tokens against the law, the cache against a fresh prefill, and the model against
what it was before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.bench.batches import one_by_one
from layerskip.bench.comparison import Comparison
from layerskip.bench.judge import Judge
from layerskip.bench.lawtest import LawTest, law_tests
from layerskip.bench.methods import Engine, Method, Peer, Task
from layerskip.config import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, DraftOrSkip, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Passes
from layerskip.decoding.sources import second_model
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.lookup_laws import LookupLaws
from layerskip.model.opening import open_model
from layerskip.model.sublayers import Sublayers

LEVEL = 1e-6
"""Probability that the sampled-law tests together call a correct engine wrong."""

ANY = SkipConfig(attention=(0,))
"""A draft that every model has."""

_LAW_PROMPTS = 2  # prompts that laws are recorded on, at two positions each


@dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Attributes:
        greedy: self-speculation against the library's own `generate(do_sample=False)`.
        plain: the same texts against this engine's plain decoding.
        coupled: coupled sampling against this engine's plain decoding with the same seed.
        laws: by accept rule, tokens drawn from recorded laws.
        cache_error: largest deviation of the keys and values after decoding from a fresh prefill,
            over the largest value of the layer.
        cache_resolution: the square root of the dtype's resolution: far above what rounding does,
            far below the keys of a token that does not belong there.
        changed: what is not as it was found in the model: names of weights, hooks or settings.
    """

    greedy: Comparison
    plain: Comparison
    coupled: Comparison
    laws: dict[str, LawTest]
    cache_error: float
    cache_resolution: float
    changed: tuple[str, ...]

    @property
    def laws_passed(self) -> bool:
        return all(test.passed(LEVEL / len(self.laws)) for test in self.laws.values())

    @property
    def cache_passed(self) -> bool:
        return self.cache_error <= self.cache_resolution

    @property
    def passed(self) -> bool:
        """Whether nothing but near-ties was found."""
        faults = self.greedy.faults + self.plain.faults + self.coupled.faults
        return not faults and self.laws_passed and self.cache_passed and not self.changed

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "passed": self.passed,
            "greedy": self.greedy.to_dict(),
            "plain": self.plain.to_dict(),
            "coupled": self.coupled.to_dict(),
            "laws": {
                "passed": self.laws_passed,
                "level": LEVEL,
                **{
                    rule: {"draws": test.draws, "p_values": list(test.p_values)}
                    for rule, test in self.laws.items()
                },
            },
            "cache": {
                "passed": self.cache_passed,
                "error": self.cache_error,
                "resolution": self.cache_resolution,
            },
            "model": {"as_found": not self.changed, "changed": list(self.changed)},
        }


def check(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig | None,
    *,
    lookup: bool | Lookup = False,
    trees: LookupLaws | None = None,
    assistant: Sublayers | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    seed: int = 0,
    execution: str = "auto",
    note: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Check on this model and machine that self-speculation changes nothing but the speed.

    Args:
        model: a supported causal language model.
        prompts: token ids, each (1, T), at least one.
        skip, lookup, trees, assistant: what drafts come from, as for `LayerSkipDecoding`. Of a skip
            config's `decoding` block only the draft vocabulary counts: every round drafts a fixed
            length, so that drafts are checked also where they would not pay.
        max_new_tokens: tokens decoded from each prompt.
        temperature: of the sampled parts, on the plain softmax otherwise.
        seed: of the sampled parts; the result is a function of it.
        execution: as for `LayerSkipDecoding`.
        note: told what begins, in words.

    Raises:
        ValueError: nothing to compare, or prompts that the model's positions cannot hold.
    """
    if not prompts:
        raise ValueError("check needs at least one prompt, got none")
    opened = open_model(model, execution)
    opened.check_lengths(
        [ids.shape[1] for ids in prompts], max(ids.shape[1] for ids in prompts) + max_new_tokens
    )
    before = _fingerprint(model)
    prompts = [ids.to(opened.device) for ids in prompts]
    sampled = Task(max_new_tokens, True, temperature, seed=seed, execution=execution)
    note("greedy, against plain decoding and transformers")
    greedily = Task(max_new_tokens, execution=execution)
    drafts: dict[str, Any] = {"lookup": lookup, "trees": trees, "assistant": assistant}
    greedy = compare(model, prompts, skip, greedily, **drafts)
    note("coupled sampling, against plain decoding")
    coupled = compare(model, prompts, skip, sampled, **drafts)
    note("the sampled law")
    if skip is not None and skip.draft_vocabulary is not None:
        opened = opened.trimmed(skip.draft_vocabulary)
    few = one_by_one(prompts[:_LAW_PROMPTS])
    texts = [Engine(model, sampled).decode(batch, 0, perf_counter).tokens[0] for batch in few]
    with torch.no_grad():
        pairs = [(batch.input_ids, text) for batch, text in zip(few, texts, strict=True)]
        # what is looked up has no law of its own: any draft's will do
        own = skip or ANY if assistant is None else second_model(opened, assistant)
        laws = law_tests(opened, pairs, own, temperature=temperature, seed=seed)
    note("the cache")
    with torch.no_grad():
        every: list[DraftOrSkip] = [Lookup()] if lookup else []
        every += [] if trees is None else [trees]
        every += [] if assistant is None else [second_model(opened, assistant)]
        every += [] if skip is None else [skip]
        cache_error = _cache_error(opened, prompts[0], every, max_new_tokens)
    after = _fingerprint(model)
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    return CheckReport(
        greedy=greedy["generate"],
        plain=greedy["plain"],
        coupled=coupled["plain"],
        laws=laws,
        cache_error=cache_error,
        cache_resolution=math.sqrt(torch.finfo(opened.dtype).eps),
        changed=tuple(changed),
    )


def compare(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig | None,
    task: Task,
    *,
    lookup: bool | Lookup = False,
    trees: LookupLaws | None = None,
    assistant: Sublayers | None = None,
) -> dict[str, Comparison]:
    """Decoding with drafts, prompts (1, T), against the texts that it must give.

    Those are this engine's plain decoding, "plain", and, where the task does not sample,
    `model.generate(do_sample=False)`, "generate". Every round drafts a fixed length, also where
    drafts would not pay.
    """
    own = None if skip is None else skip.bare()
    drafts: dict[str, Any] = {"lookup": lookup, "trees": trees, "assistant": assistant}
    drafting = Engine(model, task, "self", own, controller="fixed", **drafts)
    references: list[Method] = [Engine(model, task)]
    references += [] if task.do_sample else [Peer(model, task)]
    judge = Judge(model, task, [*references, drafting])
    batches = one_by_one(prompts)
    decoded = [(batch, drafting.decode(batch, 0, perf_counter).tokens) for batch in batches]
    found = {}
    for reference in references:
        comparison = judge.compare(drafting, decoded, reference, measure=True)
        assert comparison is not None  # greedy and coupled texts are promised
        found[reference.kind] = comparison
    return found


# ---------------------------------------------------------------------------------------------
# The cache, and the model itself.


def _cache_error(
    model: Sublayers, ids: Tensor, drafts: Sequence[DraftOrSkip], max_new_tokens: int
) -> float:
    """Largest deviation of keys and values after greedy decoding from a fresh prefill."""
    request = Request(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        law=Law(do_sample=False, rows=1),
    )
    decoder = Decoder(model, drafts, Fixed(3), request, max_draft_length=3)
    for _ in decoder.rounds():
        pass
    length = decoder.passes.lengths[0]
    tokens = torch.cat([ids[0], ids.new_tensor(decoder.emitted[0])])[:length]  # (length,)
    fresh = Passes(model, [], [tokens], max_new_tokens=1, max_draft_length=0)
    fresh.prefill()
    got = dict(decoder.passes.cache.parts(0, 0, length))
    return max(_deviation(got[part], wanted) for part, wanted in fresh.cache.parts(0, 0, length))


def _deviation(got: Tensor, wanted: Tensor) -> float:
    """The largest, over the largest value, in the last slots (H, n, D) that both hold."""
    held = min(got.shape[1], wanted.shape[1])
    # on the CPU: not every device has float64
    got, wanted = (kept[:, -held:].cpu().double() for kept in (got, wanted))
    return float((got - wanted).abs().max() / wanted.abs().max())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """What must be the same afterwards, by name: weights bit by bit, hooks, classes, settings."""
    found: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = (tensor.data_ptr(), tensor.shape, tensor.dtype, _bits(tensor))
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind)) for kind in _HOOKS]
        found[f"{name or 'model'} (module)"] = (
            type(module),
            module.training,
            hooks,
            sorted(vars(module)),
        )
    for name in ("config", "generation_config"):
        found[name] = str(getattr(model, name).to_dict())
    return found


def _bits(tensor: Tensor) -> int | None:
    """The sum of a tensor's bit patterns; None where there are none to read."""
    if tensor.is_meta or not tensor.is_contiguous() or not tensor.numel():
        return None
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.detach().reshape(-1).view(kinds[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))
