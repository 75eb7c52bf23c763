"""The Python interface: `LayerSkipDecoding` for `model.generate()`, `generate` and `decode`.

Each passes a request to the engine and returns the output; `requests.py` checks the arguments.
Shapes: B rows, W width of the padded prompts, n new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from layerskip.api import arguments
from layerskip.api.plan import open_plan
from layerskip.api.settings import Settings, Skips
from layerskip.costs.speculation import CostTable
from layerskip.decoding.engine import Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.rounds import DecodingStats, Round
from layerskip.decoding.seats import Reason
from layerskip.decoding.sources.universal import fitting
from layerskip.families.wrappers import unwrapped
from layerskip.files.schema import integer
from layerskip.library import GenerateDecoderOnlyOutput, dropped_by_the_call


@dataclass
class GenerationOutput(GenerateDecoderOnlyOutput):
    """The result of `generate()`, with statistics of the decoding.

    Attributes:
        sequences: prompts and new tokens, (B, W + n); rows that ended early are right-padded.
        scores, logits: one (B, V) float32 per step, if requested; zeros for rows that had ended.
        stats: counts of the decoding.
        rounds: a record of every round, without its scores and logits.
        costs: the cost table of the last source as the controller first used it; None if the
            controller had nothing to decide.
        finish_reasons: why each row ended: "stop" (an end token, a stop string or another
            criterion) or "length".
        past_key_values: always None, under every name that the library has for it. To continue a
            text, keep a `layerskip.Session`.
    """

    stats: DecodingStats | None = None
    rounds: list[Round] | None = None
    costs: CostTable | None = None
    finish_reasons: list[Reason | None] | None = None


class LayerSkipDecoding(Settings):
    """Self-speculative decoding, used as `model.generate(..., custom_generate=this)`.

    One object may serve several models and threads. Greedy output equals
    `model.generate(do_sample=False)`. Sampled output follows the model's distribution; with the
    coupled rule it depends on model, prompt, settings and seed alone, never on the drafts.

    A `streamer` of `model.generate()` works, but is not ended if the library itself rejects the
    call. If a thread waits for its end, use `layerskip.generate`, which always ends it. Also use it
    for `stop_strings`: the library does not find their tokenizer beside `custom_generate`.

    Args:
        skip: the sublayers that the model's own draft skips or rounds, or a path to the JSON. If
            several are given, "expected-gain" chooses one in each round by its past gain, and
            options come from the first. Without one, drafts need no setup: they are looked up, and
            the model drafts in 8 bits where that is fast (see `layerskip.api.drafts`). Other given
            sources are added.
        lookup: whether drafts are also looked up in each row's own history (a `Lookup` adds other
            texts). By default they are, beside any other draft; under the rejection rule, where
            texts depend on drafts, not beside a named skip config.
        remember: where earlier answers are kept, of which drafts are made, too: "memory" (as long
            as this object), "shared" (in servers, for all owners of texts), "off", or a folder. By
            default "memory" in a `Session`, else "off". Under the rejection rule, where texts
            depend on drafts, nothing is remembered.
        remember_tokens: maximum number of remembered tokens (100,000); the oldest go first.
        tokenizer: that of the model, by which the files of such a folder are known.
        assistant: a second model that also drafts, or one opened as `Sublayers`. If its tokenizer
            differs (`layerskip.check_vocabularies` compares them), give a `UniversalAssistant` of
            it. It drafts from text alone if prompts have pictures. Or the official assistant of a
            Gemma 4, an EAGLE-3 head (`layerskip.model.eagle_head`) or a DFlash drafter
            (`layerskip.model.block_drafter`); these may be given as a folder or Hub id.
        sources: further sources, including your own (see `layerskip.Source`), or their names:
            "logit-lookup", and those that installed packages add.
        controller: one of `config.registry.CONTROLLERS` ("expected-gain" by default), the name of
            one that an installed package adds, or an object of the `Controller` protocol, which
            serves one call at a time.
        max_draft_length: maximum number of tokens drafted in a round.
        threshold: confidence threshold, for controllers that have one.
        adaptive: parameters of "adaptive-threshold" by name: alpha, the target acceptance rate
            (0.9); epsilon, how far a round moves the threshold's target (0.01); beta1 and beta2,
            weights of the old values in the averages of the rate (0.5) and the threshold (0.9).
        acceptance: "coupled" (default), "rejection", or "spectr", the rejection rule for several
            independent drafts of a position.
        branches: whether "expected-gain" has trees verified that include the second-best tokens of
            drafts (the best eight of a module) where these are expected to pay; up to 12 tokens,
            or `max_draft_length`.
        enabled: False decodes plainly.
        draft_memory: maximum bytes for copies of weights for drafts if no skip config is given; by
            default half of the free memory. There is no limit under the rejection rule, since the
            text must not depend on free memory. 0: no copies, and no head from the checkpoint.
        draft_vocabulary: the only token ids that drafts may use (see `layerskip.texts.vocabulary`);
            their rows of the head are copied once per model.
        seed: sampling seed; row i of a batch draws from stream (seed, i). None draws a seed from
            torch's default generator at every call; the stats report it.
        seeds: one seed per row instead, so that a row's text is the same alone and in any batch.
        costs: the controller's cost table; otherwise measured, or taken from the skip config.
        execution: "auto", "modules", "fused", "native" or "captured", see `Sublayers`.
        cached: keys and values of earlier texts to start from (see `layerskip.Session`).
        progress: called after every pass over the prompts with the number of prompt tokens done
            and their total.
        clock: sets the rounds' `times`; on a GPU it should synchronise with the device.

    Settings left at None come from the skip config's `decoding` block, then from the defaults.
    """

    def explain(self, model: Any) -> str:
        """List the draft sources of a model, and why there are no better ones; one per line."""
        return open_plan(model, self).explain()

    def prepare(
        self, model: Any, *, rows: int = 1, context: int = 0, seconds: float = 2.0, **sampling: Any
    ) -> CostTable | None:
        """Make copies and measure costs now instead of during the first calls.

        Args:
            rows: batch size of later calls.
            context: tokens that their texts reach; costs are then also measured in long texts.
            seconds: approximate time for measuring.
            sampling: do_sample, temperature, top_k and top_p of later calls, as for `decode`.

        Returns:
            The costs of the last source at that context; None if there is none or none are needed.
        """
        plan = open_plan(model, self, sampling=sampling.get("do_sample", False))
        return plan.prepare(rows, context, seconds, **sampling)

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,  # given only where a signature names it
        **prepared: Any,
    ) -> GenerationOutput | Tensor:
        """Decode with arguments that `model.generate(custom_generate=...)` has prepared.

        Raises:
            ValueError: an argument is not supported; the message names it.
        """
        streamer = streamer or dropped_by_the_call(self, "streamer")  # already has prompt
        if dropped_by_the_call(self, "assistant_model") is not None:
            warnings.warn(
                "assistant_model has no effect with custom_generate: give the second model to "
                "LayerSkipDecoding(assistant=...)",
                stacklevel=2,
            )
        with arguments.ending(streamer):
            prepared |= {"streamer": streamer, "inputs_tensor": inputs_tensor}
            return self._decode(model, input_ids, **prepared)

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        *,
        logits_processor: transformers.LogitsProcessorList | None = None,
        stopping_criteria: transformers.StoppingCriteriaList | None = None,
        generation_config: transformers.GenerationConfig,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerationOutput | Tensor:
        config = generation_config  # named as in the other functions
        encoded = arguments.encoded_of(input_ids, inputs_tensor, model_kwargs)
        pictures = arguments.pictures_of(model, input_ids, config, model_kwargs)
        arguments.drop_token_types(model, input_ids, model_kwargs)
        attention_mask = arguments.checked_mask(input_ids, config, model_kwargs)
        arguments.check_tokens(model, input_ids)
        rows, width = input_ids.shape
        if streamer is not None and rows > 1:
            raise ValueError(f"a streamer serves one row, got {rows}; stream prompts one by one")
        criteria = list(stopping_criteria or [])
        ended, full = transformers.EosTokenCriteria, transformers.MaxLengthCriteria
        eos = [c for c in criteria if type(c) is ended]
        limits = [c.max_length for c in criteria if type(c) is full] or [config.max_length]
        others = [c for c in criteria if type(c) not in (ended, full)]
        alone = any(hasattr(c, "eos_token_id") for c in criteria)  # as the library decides it
        seeds = self.row_seeds(rows, config.do_sample)
        request = Request(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max(1, math.ceil(min(limits)) - width),
            law=Law(logits_processor or [], do_sample=config.do_sample, rows=rows),
            keys=[stream_key(*seed) for seed in seeds],
            acceptance=self.acceptance,
            eos=frozenset(token for c in eos for token in c.eos_token_id.flatten().tolist()),
            stop=arguments.stop_of(
                others, scored=bool(config.output_scores), together=0 if alone else rows
            ),
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            pictures=pictures,
            encoded=encoded,
            progress=self.progress,
            clock=self.clock,
        )
        plan = open_plan(model, self, sampling=config.do_sample, encoded=encoded)
        decoder, all_costs = plan.decoder(request)
        rounds = []
        for round_ in decoder.rounds():
            rounds.append(round_)
            if streamer is not None:
                streamer.put(torch.tensor(round_.tokens[0]))  # (n,)
        decoder.stats.seeds = tuple(seed[0] for seed in seeds)
        new = (max if alone else min)(map(len, decoder.emitted))
        sequences = arguments.padded(input_ids, decoder.emitted, config)[:, : width + new]
        if not config.return_dict_in_generate:
            return sequences
        costs = None
        if all_costs is not None and decoder.stats.num_rounds:
            costs = all_costs.at(int(attention_mask.sum()) // rows, rows)
        kept: dict[str, Any] = {
            name: arguments.per_step(rounds, name, rows)[:new]
            for name in ("scores", "logits")
            if getattr(config, f"output_{name}")
        }
        return GenerationOutput(
            sequences=sequences,  # type: ignore[arg-type]  # the library says LongTensor
            **kept,
            stats=decoder.stats,
            rounds=[replace(round_, scores=None, logits=None) for round_ in rounds],
            costs=costs,
            finish_reasons=[seat.reason for seat in decoder.seats],
        )


def generate(
    model: Any,
    inputs: Tensor | Mapping[str, Any] | None = None,
    *,
    skip: Skips | Sequence[Skips] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    **kwargs: Any,
) -> GenerationOutput:
    """Like `model.generate()` with self-speculation, including arguments that its hook drops.

    Args:
        model: a supported causal language model.
        inputs: token ids (B, W), left-padded, or the output of a tokenizer or, with pictures, of a
            processor, which may also be given as keywords (`**inputs`).
        skip: as for `LayerSkipDecoding`, whose other settings may be given as keywords, too.
        streamer: receives the prompt, then new tokens as 1-D tensors, one round at a time; for one
            row only. It is always ended, even after an error.
        tokenizer: required by `stop_strings`, and by a folder of `remember`.
        assistant_tokenizer: the second model's tokenizer. If it differs from `tokenizer`, drafts
            are re-encoded.
        **kwargs: settings of `LayerSkipDecoding`; everything else goes to `model.generate()`.
    """
    with arguments.ending(streamer):
        settings = {name: kwargs.pop(name) for name in _SETTINGS & kwargs.keys()}
        if assistant_tokenizer is not None:
            if tokenizer is None:
                raise ValueError("assistant_tokenizer needs the model's own; pass tokenizer=")
            second = settings.get("assistant")
            settings["assistant"] = second and fitting(second, tokenizer, assistant_tokenizer)
        decoding = LayerSkipDecoding(skip, tokenizer=tokenizer, **settings)
        ends = transformers.StoppingCriteriaList(stopping_criteria or [])
        for asked in (kwargs.get("generation_config"), unwrapped(model).generation_config):
            if stop_strings is None:
                stop_strings = getattr(asked, "stop_strings", None)
                kwargs |= {} if stop_strings is None else {"stop_strings": None}
            if kwargs.get("token_healing", getattr(asked, "token_healing", None)):
                raise ValueError(
                    "token_healing is not supported; leave it out, and give as the prompt what "
                    "model.heal_tokens(input_ids, tokenizer) returns"
                )
        if stop_strings is not None:
            if tokenizer is None:
                raise ValueError("stop_strings needs the tokenizer; pass tokenizer=")
            ends.append(transformers.StopStringCriteria(tokenizer, stop_strings))
        if not isinstance(inputs, Mapping):
            inputs = {} if inputs is None else {"input_ids": inputs}
        named = {**inputs, **kwargs}
        if "input_ids" in named:  # the library checks the rest
            arguments.check_ids(named["input_ids"])
            arguments.check_tokens(model, named["input_ids"])
            if named.get("attention_mask") is not None:
                arguments.check_mask(named["input_ids"], named["attention_mask"])
        if kwargs.get("synced_gpus"):
            raise ValueError("synced_gpus is not supported: ranks would draft different lengths")
        if kwargs.pop("assistant_model", None) is not None:
            raise ValueError("assistant_model is not supported; give assistant= for a second model")
        output = type(model).generate(  # an instance's own may be what has called this
            model,
            **inputs,
            custom_generate=partial(decoding._decode, streamer=streamer),
            streamer=streamer,
            stopping_criteria=ends,
            **({"return_dict_in_generate": True} | kwargs),
        )
        return output  # type: ignore[no-any-return]


_SETTINGS = {*inspect.signature(Settings).parameters} - {"skip"}


def decode(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    skip: Skips | Sequence[Skips] | None = None,
    max_new_tokens: int = 128,
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    logits_processor: Sequence[Any] = (),
    eos_token_id: int | Sequence[int] | None = None,
    keep_scores: bool = False,
    **settings: Any,
) -> Iterator[Round]:
    """Decode token ids round by round, using the engine without `generate()`.

    Prompts with pictures need `generate()`, which runs the vision tower.

    Args:
        input_ids: (B, W), left-padded where attention_mask (B, W) is 0.
        skip, **settings: as for `LayerSkipDecoding`.
        temperature, top_k, top_p: of sampling. None means the same as in `model.generate()`: the
            value of the model's generation config, then the library's default, whose top_k is 50.
            Give top_k=0 and top_p=1.0 for the full softmax.
        logits_processor: applied before temperature, top_k and top_p.
        keep_scores: keep processed scores and raw logits of every emitted token in the rounds.
        eos_token_id: tokens that end a row; the model's own by default.

    Yields:
        Round 0 (the token after the prefill), then each round.
    """
    max_new_tokens = integer(1)(max_new_tokens, "max_new_tokens")
    arguments.check_ids(input_ids)
    model = unwrapped(model)
    arguments.check_tokens(model, input_ids)
    decoding = LayerSkipDecoding(skip, **settings)
    rows = input_ids.shape[0]
    law: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, off in () if do_sample else (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
        if law[name] not in (None, off):
            warnings.warn(f"{name} has no effect without do_sample=True", stacklevel=2)
    law = {"do_sample": do_sample, **arguments.sampling_of(model, **law)}
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    mask = arguments.checked_mask(input_ids, model.generation_config, {"attention_mask": mask})
    request = Request(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        law=arguments.law_of(law, rows, logits_processor),
        keys=[stream_key(*seed) for seed in decoding.row_seeds(rows, do_sample)],
        acceptance=decoding.acceptance,
        eos=arguments.end_tokens(model, eos_token_id),
        keep_scores=keep_scores,
        keep_logits=keep_scores,
        progress=decoding.progress,
        clock=decoding.clock,
    )
    with torch.no_grad():
        decoder, _ = open_plan(model, decoding, sampling=do_sample).decoder(request)
        rounds = decoder.rounds()
    while True:
        with torch.no_grad():  # not around the yield, so that the caller keeps its grad mode
            round_ = next(rounds, None)
        if round_ is None:
            return
        yield round_
