"""Checks that decoding is lossless for a model on this machine, in token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.api.plan import Plan
from layerskip.bench.batches import PromptBatch, one_by_one
from layerskip.bench.comparison import Comparison, Judge
from layerskip.bench.lawtest import LawTest, law_tests
from layerskip.bench.methods import Engine, Method, Peer, Task
from layerskip.config.skips import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Passes
from layerskip.decoding.seats import Seat
from layerskip.files.environment import free_memory
from layerskip.model.opened_models import sublayers_of
from layerskip.weights.stored import unpacked_model

LEVEL = 1e-6
"""Probability that the tests of sampled distributions together reject a correct engine."""

TEMPERATURE = 0.8  # of sampled texts

ANY = SkipConfig(attention=(0,))
"""A draft that is possible for every model."""

_LAW_PROMPTS = 2  # prompts on which distributions are recorded, at two positions each


@dataclass(frozen=True)
class CheckReport:
    """The results of `check`.

    Attributes:
        greedy: self-speculation compared with the library's `generate(do_sample=False)`.
        plain: the same texts compared with this engine's plain decoding.
        coupled: coupled sampling compared with this engine's plain decoding at the same seed.
        laws: by acceptance rule, tokens drawn from recorded distributions.
        cache_error: largest deviation of the keys and values after decoding from a fresh prefill,
            relative to the layer's largest value.
        cache_resolution: the square root of the dtype's resolution: far more than rounding causes,
            far less than the keys of a wrong token would.
        changed: what is changed in the model: names of weights, hooks or settings.
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
        faults = self.greedy.faults + self.plain.faults + self.coupled.faults
        return not faults and self.laws_passed and self.cache_passed and not self.changed

    def to_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            **{name: getattr(self, name).to_dict() for name in ("greedy", "plain", "coupled")},
            "laws": {
                "passed": self.laws_passed,
                "level": LEVEL,
                **{rule: asdict(test) for rule, test in self.laws.items()},
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
    max_new_tokens: int = 64,
    seed: int = 0,
    execution: str = "auto",
    note: Callable[[str], None] = lambda _: None,
    **drafts: Any,
) -> CheckReport:
    """Check on this model and machine that self-speculation changes nothing but the speed.

    Args:
        model: a supported causal language model.
        prompts: token ids, each (1, T), at least one.
        skip: only the draft vocabulary of its `decoding` block is used: every round has a fixed
            draft length, so that drafts are checked even where they would not pay.
        seed: of the sampled parts, which use the softmax at `TEMPERATURE`.
        execution: as for `LayerSkipDecoding`.
        note: called with a description of each part as it begins.
        drafts: other sources: `lookup`, `sources` and `assistant` as for `LayerSkipDecoding`.

    Raises:
        ValueError: there is nothing to compare, or prompts exceed the model's positions.
    """
    if not prompts:
        raise ValueError("check needs at least one prompt, got none")
    opened = sublayers_of(model, execution)
    lengths = [ids.shape[1] for ids in prompts]
    opened.check_lengths(lengths, max(lengths) + max_new_tokens)
    before = state_of(model)
    batches = one_by_one([ids.to(opened.device) for ids in prompts])
    sampled = Task(max_new_tokens, True, TEMPERATURE, seed=seed, execution=execution)
    greedily = Task(max_new_tokens, execution=execution)
    note("greedy, against plain decoding and transformers")
    greedy = compare(model, batches, _drafting(model, greedily, skip, drafts))
    note("coupled sampling, against plain decoding")
    coupled = compare(model, batches, _drafting(model, sampled, skip, drafts))
    note("the sampled tokens' distribution")
    plan = _drafting(model, sampled, skip, drafts).plan
    plain = Engine(model, sampled)
    with torch.no_grad():
        texts = [
            (batch.input_ids, plain.decode(batch, 0, perf_counter).tokens[0])
            for batch in batches[:_LAW_PROMPTS]
        ]
        # A lookup has no distribution of its own; that of any draft will do.
        source = next((each for each in plan.sources if not each.step_free), ANY)
        laws = law_tests(plan.model, texts, source, temperature=TEMPERATURE, seed=seed)
        note("the cache")
        cache_error = _cache_error(plan, batches[0].input_ids, max_new_tokens)
    after = state_of(model)
    return CheckReport(
        greedy=greedy["generate"],
        plain=greedy["plain"],
        coupled=coupled["plain"],
        laws=laws,
        cache_error=cache_error,
        cache_resolution=math.sqrt(torch.finfo(opened.dtype).eps),
        changed=tuple(sorted(key for key in before | after if before.get(key) != after.get(key))),
    )


def _drafting(model: Any, task: Task, skip: SkipConfig | None, drafts: dict[str, Any]) -> Engine:
    """The method to check, with a fixed draft length in every round."""
    bare = None if skip is None else skip.bare()
    return Engine(model, task, "self", bare, controller="fixed", **drafts)


def compare(model: Any, batches: Sequence[PromptBatch], drafting: Engine) -> dict[str, Comparison]:
    """Compare texts decoded with drafts with their references.

    These are this engine's plain decoding, "plain", and, for a greedy task,
    `model.generate(do_sample=False)`, "generate".
    """
    task = drafting.task
    references: list[Method] = [Engine(model, task)]
    references += [] if task.do_sample else [Peer(unpacked_model(model, free_memory() or 0), task)]
    judge = Judge(model, task, [*references, drafting])
    texts = [(batch, drafting.decode(batch, 0, perf_counter).tokens) for batch in batches]
    comparisons = {}
    for reference in references:
        comparison = judge.compare(drafting, texts, reference, every=True)
        assert comparison is not None  # greedy and coupled texts must equal their references
        comparisons[reference.kind] = comparison
    return comparisons


def _cache_error(plan: Plan, ids: Tensor, max_new_tokens: int) -> float:
    """Largest deviation of keys and values after greedy decoding from a fresh prefill."""
    request = Request(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        law=Law(do_sample=False, rows=1),
    )
    decoder = Decoder(plan.model, plan.sources, Fixed(3), request, max_draft_length=3)
    for _ in decoder.rounds():
        pass
    seat = decoder.seats[0]
    length = seat.length
    tokens = torch.cat([ids[0], ids.new_tensor(seat.emitted)])[:length]  # (length,)
    fresh = Passes(plan.model, [], [Seat(tokens)], max_draft_length=0)
    fresh.prefill()
    got = dict(decoder.passes.cache.parts(0, 0, length))
    return max(deviation(got[part], wanted) for part, wanted in fresh.cache.parts(0, 0, length))


def deviation(got: Tensor, wanted: Tensor) -> float:
    """Largest deviation in the last slots (H, n, D) of both, relative to the largest value."""
    held = min(got.shape[1], wanted.shape[1])
    # On the CPU, since not every device has float64.
    got, wanted = (kept[:, -held:].cpu().double() for kept in (got, wanted))
    return float((got - wanted).abs().max() / wanted.abs().max())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state_of(model: nn.Module) -> dict[str, Any]:
    """The state that must not change, by name: weights bit for bit, hooks, classes, settings."""
    state: dict[str, Any] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[name] = (tensor.data_ptr(), tensor.shape, tensor.dtype, _bits(tensor))
    for name, module in model.named_modules():
        hooks = [list(getattr(module, kind)) for kind in _HOOKS]
        state[f"{name or 'model'} (module)"] = (
            type(module),
            module.training,
            hooks,
            sorted(vars(module)),
        )
    for name in ("config", "generation_config"):
        state[name] = str(getattr(model, name).to_dict())
    return state


def _bits(tensor: Tensor) -> int | None:
    """The sum of a tensor's bit patterns; None if they cannot be read."""
    if tensor.is_meta or not tensor.is_contiguous() or not tensor.numel():
        return None
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.detach().reshape(-1).view(kinds[tensor.element_size()])
    return int(words.sum(dtype=torch.int64))
