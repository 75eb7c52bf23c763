"""The losslessness check of a model on this machine, in token ids; knows no text and no files.

Two decodings that must agree are compared token by token. Where they first differ, the target's
own scores, from a fresh forward pass over the common prefix, tell a near-tie from a fault: a
near-tie is a position where both tokens lie within the resolution of the highest score,

    resolution = max|score| * (2 sqrt(2L) eps(dtype) + 4 eps(float32)),

a random walk of one rounding error per sublayer, for each of the two passes compared, and the
float32 in which `generate()` and this engine both hold scores. Everything else is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from layerskip.bench.lawtest import DRAWS, LawTest, chi_square, draw_rounds
from layerskip.checkpoints import unpadded
from layerskip.config import SkipConfig
from layerskip.decoding.controllers import Fixed
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law, gumbel_noise, softmax_law, stream_key
from layerskip.decoding.passes import Session
from layerskip.generation import decode, generate
from layerskip.model.sublayers import Sublayers

LEVEL = 1e-6
"""Probability that the sampled-law tests together call a correct engine wrong."""

_SUPPORT = 256  # tokens of a recorded law that are drawn from, the most probable ones
_LAW_PROMPTS = 2  # prompts that laws are recorded on, at two positions each


@dataclass(frozen=True)
class Difference:
    """Where two decodings of a prompt first differ.

    Attributes:
        prompt: index of the prompt.
        position: index of the new token.
        expected, got: the two tokens; None where one decoding had ended.
        margin: how far the lower of the two lies below the highest score there; infinite where
            one decoding had ended, and null in JSON.
        resolution: what rounding can do to those scores.
    """

    prompt: int
    position: int
    expected: int | None
    got: int | None
    margin: float
    resolution: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference; otherwise it is a fault."""
        return self.margin <= self.resolution


@dataclass(frozen=True)
class Comparison:
    """Two ways to decode the same prompts.

    Attributes:
        prompts: how many were compared.
        tokens: new tokens that were equal, up to the first difference of each prompt.
        differences: of the prompts that differ.
    """

    prompts: int
    tokens: int
    differences: tuple[Difference, ...]

    @property
    def near_ties(self) -> int:
        return sum(difference.near_tie for difference in self.differences)

    @property
    def faults(self) -> int:
        return len(self.differences) - self.near_ties

    def to_dict(self) -> dict[str, Any]:
        differences = [
            asdict(d)
            | {"near_tie": d.near_tie, "margin": d.margin if math.isfinite(d.margin) else None}
            for d in self.differences
        ]
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "near_ties": self.near_ties,
            "faults": self.faults,
            "differences": differences,
        }


@dataclass(frozen=True)
class CheckReport:
    """What `check` found.

    Attributes:
        greedy: self-speculation against the library's own `generate(do_sample=False)`.
        coupled: coupled sampling against this engine's plain decoding with the same seed.
        laws: by accept rule, tokens drawn from recorded laws.
        cache_error: largest deviation of the keys and values after decoding from a fresh prefill,
            over the largest value of the layer.
        cache_resolution: the square root of the dtype's resolution: far above what rounding does,
            far below the keys of a token that does not belong there.
        changed: what is not as it was found in the model: names of weights, hooks or settings.
    """

    greedy: Comparison
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
        faults = self.greedy.faults + self.coupled.faults
        return not faults and self.laws_passed and self.cache_passed and not self.changed

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "passed": self.passed,
            "greedy": self.greedy.to_dict(),
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
    skip: SkipConfig,
    *,
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
        skip: which sublayers the draft leaves out. Of its `decoding` block only the draft
            vocabulary counts: every round drafts a fixed length, so that drafts are checked also
            where they would not pay.
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
    opened = Sublayers(model, execution=execution)
    opened.check_lengths(
        [ids.shape[1] for ids in prompts], max(ids.shape[1] for ids in prompts) + max_new_tokens
    )
    before = _fingerprint(model)
    prompts = [ids.to(opened.device) for ids in prompts]
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "execution": execution}
    note("greedy, against transformers")
    greedy = compare_greedy(model, prompts, skip, **settings)
    note("coupled sampling, against plain decoding")
    coupled = compare_coupled(model, prompts, skip, temperature=temperature, seed=seed, **settings)
    note("the sampled law")
    if skip.draft_vocabulary is not None:
        opened = opened.trimmed(skip.draft_vocabulary)
    with torch.no_grad():
        laws = _law_tests(opened, prompts, skip, max_new_tokens, temperature, seed)
    note("the cache")
    with torch.no_grad():
        cache_error = _cache_error(opened, prompts[0], skip, max_new_tokens)
    after = _fingerprint(model)
    changed = sorted(
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    )
    return CheckReport(
        greedy=greedy,
        coupled=coupled,
        laws=laws,
        cache_error=cache_error,
        cache_resolution=math.sqrt(torch.finfo(opened.dtype).eps),
        changed=tuple(changed),
    )


def compare_greedy(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig,
    *,
    max_new_tokens: int,
    execution: str = "auto",
) -> Comparison:
    """Greedy self-speculation against `model.generate(do_sample=False)`, prompts (1, T)."""
    opened = Sublayers(model, execution=execution)
    skip = skip.bare()

    def reference(ids: Tensor, limit: int, **kwargs: Any) -> Any:
        return model.generate(**unpadded(ids), do_sample=False, max_new_tokens=limit, **kwargs)

    def scores(ids: Tensor) -> Tensor:
        # one step of the library's own, so that its processors speak too
        out = reference(ids, 1, output_scores=True, return_dict_in_generate=True)
        return out.scores[0][0]  # type: ignore[no-any-return]  # (V,)

    def compare(index: int, ids: Tensor) -> tuple[int, Difference | None]:
        width = ids.shape[1]
        expected = reference(ids, max_new_tokens)[0, width:].tolist()
        out = generate(
            model,
            unpadded(ids),
            skip=skip,
            controller="fixed",
            do_sample=False,
            max_new_tokens=max_new_tokens,
            execution=execution,
        )
        got = out.sequences[0, width:].tolist()
        return first_difference(opened, index, ids, expected, got, scores)

    return _compare_all(compare, prompts)


def compare_coupled(
    model: Any,
    prompts: Sequence[Tensor],
    skip: SkipConfig,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    execution: str = "auto",
) -> Comparison:
    """Coupled sampling with drafts against this engine's plain decoding, prompts (1, T)."""
    opened = Sublayers(model, execution=execution)
    skip = skip.bare()

    def scores(ids: Tensor) -> Tensor:
        with torch.no_grad():
            raw: Tensor = model(ids).logits[0, -1].float()  # (V,)
        return raw / temperature + _noise(seed, ids.shape[1], raw)

    def compare(index: int, ids: Tensor) -> tuple[int, Difference | None]:
        expected, got = (
            _sample(
                model,
                ids,
                skip,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                seed=seed,
                execution=execution,
                controller="fixed",
                enabled=enabled,
            )
            for enabled in (False, True)
        )
        return first_difference(opened, index, ids, expected, got, scores)

    return _compare_all(compare, prompts)


def _sample(model: Any, ids: Tensor, skip: SkipConfig, **settings: Any) -> list[int]:
    rounds = decode(model, ids, skip=skip, do_sample=True, **settings)
    return [token for round_ in rounds for token in round_.tokens[0]]


def _noise(seed: int, place: int, like: Tensor) -> Tensor:
    key = stream_key(seed, 0)
    return gumbel_noise([key], [place], like.shape[-1], device=like.device)[0]  # (V,)


def _compare_all(
    compare: Callable[[int, Tensor], tuple[int, Difference | None]], prompts: Sequence[Tensor]
) -> Comparison:
    results = [compare(index, ids) for index, ids in enumerate(prompts)]
    return Comparison(
        prompts=len(results),
        tokens=sum(equal for equal, _ in results),
        differences=tuple(difference for _, difference in results if difference is not None),
    )


def first_difference(
    model: Sublayers,
    prompt: int,
    ids: Tensor,
    expected: list[int],
    got: list[int],
    scores: Callable[[Tensor], Tensor],
) -> tuple[int, Difference | None]:
    """How many leading tokens are equal, and what follows them if it differs.

    Args:
        scores: what the token after the ids (1, T) is chosen by, (V,).
    """
    if expected == got:
        return len(got), None
    pairs = zip(expected, got, strict=False)
    shorter = min(len(expected), len(got))
    equal = next((i for i, (left, right) in enumerate(pairs) if left != right), shorter)
    if equal == shorter:  # one goes on where the other ended: no score explains that
        left, right = (tokens[equal] if equal < len(tokens) else None for tokens in (expected, got))
        return equal, Difference(prompt, equal, left, right, math.inf, 0.0)
    prefix = torch.cat([ids, ids.new_tensor([expected[:equal]])], dim=1)  # (1, T + equal)
    there = scores(prefix).double()  # (V,)
    margin = float(there.max() - torch.min(there[expected[equal]], there[got[equal]]))
    scale = float(there[there.isfinite()].abs().max())
    return equal, Difference(
        prompt, equal, expected[equal], got[equal], margin, _resolution(model, scale)
    )


def _resolution(model: Sublayers, scale: float) -> float:
    """What rounding can do to scores of that size (module docstring)."""
    depth = 2 * math.sqrt(model.num_sublayers) * torch.finfo(model.dtype).eps
    return scale * (depth + 4 * torch.finfo(torch.float32).eps)


# ---------------------------------------------------------------------------------------------
# The sampled law: many rounds of the real engine on recorded laws, without a call of the model.


def _law_tests(
    model: Sublayers,
    prompts: Sequence[Tensor],
    skip: SkipConfig,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> dict[str, LawTest]:
    laws = []
    for ids in prompts[:_LAW_PROMPTS]:
        text = _sample(
            model.model,
            ids,
            skip,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            enabled=False,
        )
        for part in dict.fromkeys((max(1, len(text) // 3), max(1, 2 * len(text) // 3))):
            laws.append(_record(model, [*ids[0].tolist(), *text[:part]], skip))
    tests = {}
    for rule in ("coupled", "rejection"):
        p_values = []
        for number, (target, draft) in enumerate(laws):
            law = softmax_law(target.double() / temperature)  # (V,)
            for tokens in draw_rounds(
                target,
                draft,
                rejection=rule == "rejection",
                temperature=temperature,
                seed=seed + number,
            ):
                p_values.append(chi_square(tokens, law))
        tests[rule] = LawTest(DRAWS, tuple(p_values))
    return tests


def _record(model: Sublayers, tokens: list[int], skip: SkipConfig) -> tuple[Tensor, Tensor]:
    """Raw logits of target and draft after the tokens, on the CPU, (V,) each.

    Of a large vocabulary the tokens that either law finds most probable.
    """
    ids = torch.tensor(tokens)
    resolved = skip.resolve(model.num_layers)
    session = Session(model, resolved, [ids[:-1]], max_new_tokens=2, max_draft_length=1)
    session.prefill()
    last = ids[-1:].to(model.device)  # (1,)
    draft = session.draft_step(last, 0)[0].float().cpu()  # (V,)
    # what follows `last` is not read
    target = session.verify(last, [(0, 0), (0, 1)])[0].float().cpu()  # (V,)
    either = torch.maximum(softmax_law(target), softmax_law(draft))
    kept = either.topk(min(_SUPPORT, len(either))).indices
    return target[kept], draft[kept]


# ---------------------------------------------------------------------------------------------
# The cache, and the model itself.


def _cache_error(model: Sublayers, ids: Tensor, skip: SkipConfig, max_new_tokens: int) -> float:
    """Largest deviation of keys and values after greedy decoding from a fresh prefill."""
    request = Request(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        law=Law(do_sample=False, rows=1),
    )
    resolved = skip.resolve(model.num_layers)
    decoder = Decoder(model, resolved, Fixed(3), request, max_draft_length=3)
    for _ in decoder.rounds():
        pass
    length = decoder.session.lengths[0]
    tokens = torch.cat([ids[0], ids.new_tensor(decoder.emitted[0])])[:length]  # (length,)
    fresh = Session(model, resolved, [tokens], max_new_tokens=1, max_draft_length=0)
    fresh.prefill()
    worst = 0.0
    for name in ("keys", "values"):
        for layer, wanted in getattr(fresh.cache, name).items():
            wanted = wanted[:, :, :length].double()  # (1, H, length, D)
            got = getattr(decoder.session.cache, name)[layer][:, :, :length].double()
            worst = max(worst, float((got - wanted).abs().max() / wanted.abs().max()))
    return worst


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


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
