"""The Python interface: `LayerSkipDecoding` for `model.generate()`, `generate` and `decode`.

Each passes a request to the engine and returns its output; `requests.py` checks the arguments.
Letters: B rows, W width of the padded prompts, n new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from layerskip.config import DecodingOptions, SkipConfig
from layerskip.costs.speculation import Costs, CostTable
from layerskip.decoding.controllers import Controller, completed, make_controller
from layerskip.decoding.engine import Decoder, Request
from layerskip.decoding.laws import Law
from layerskip.decoding.noise import stream_key
from layerskip.decoding.rounds import DecodingStats, Round
from layerskip.decoding.sources import second_model, source_of
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.lookup import Lookup
from layerskip.decoding.sources.official import Official
from layerskip.defaults import AutomaticDraft, automatic_draft, in_words, warn_of_loading
from layerskip.model.assistants import load_assistant
from layerskip.model.opening import sublayers_of
from layerskip.model.sublayers import Sublayers
from layerskip.model.whole import Whole
from layerskip.model.wrappers import unwrapped
from layerskip.requests import (
    check_ids,
    checked_mask,
    dropped_by_the_call,
    encoded_of,
    end_tokens,
    ending,
    padded,
    per_step,
    pictures_of,
    sampling_of,
    stop_of,
    warpers,
)
from layerskip.timing.tables import by_bytes, cost_tables, stored
from layerskip.vocabulary import check_vocabularies, warn_of_vocabularies

DEFAULT_CONTROLLER = "expected-gain"
LONGEST_DRAFT = 20  # the default of `max_draft_length`


@dataclass
class GenerationOutput(GenerateDecoderOnlyOutput):
    """What `generate()` returns, with statistics of the decoding.

    Attributes:
        sequences: prompts and new tokens, rows that ended early padded on the right, (B, W + n).
        scores, logits: per step (B, V) float32, when asked for; zeros for rows that had ended.
        stats: counts of the decoding.
        rounds: a record of every round, without its scores and logits.
        costs: the cost table that the controller used at first, of the last source.
    """

    stats: DecodingStats | None = None
    rounds: list[Round] | None = None
    costs: CostTable | None = None


class LayerSkipDecoding:
    """Self-speculative decoding, as `model.generate(..., custom_generate=this)`.

    One object may serve several models and threads. Greedy output equals
    `model.generate(do_sample=False)`; sampled output follows its law, and with the coupled rule it
    is a function of model, prompt, settings and seed alone, whatever is drafted.

    A `streamer` of `model.generate()` works, but nobody ends it if the library itself refuses the
    call. If something waits for its end, use `layerskip.generate`, which always ends it.

    Many calls on one small model are faster inside `with layerskip.joined(model)`.

    Args:
        skip: what the model's own draft leaves out or rounds, or a path to its JSON. Without one,
            drafts need no set-up: they are looked up, and the model drafts in 8 bits where that is
            fast (see `layerskip.defaults`). Other sources that are given are added.
        lookup: whether drafts are also looked up in each row's own history (given a `Lookup`, in
            other texts, too).
        assistant: a second model that also drafts, or one opened as `Sublayers`. It must have the
            same vocabulary: `layerskip.check_vocabularies` compares tokenizers. It drafts from text
            alone where prompts have pictures. Or the official assistant of a Gemma 4, or a folder
            or Hub id to load one from.
        sources: further sources, perhaps of your own (see `layerskip.Source`).
        controller: "expected-gain" (default), "fixed", "confidence", "adaptive-threshold",
            "heuristic", or an object of the `Controller` protocol, which serves one call at a time.
        max_draft_length: the most tokens a round drafts.
        threshold: for the controllers that have one.
        acceptance: "coupled" (default) or "rejection".
        enabled: False decodes plainly.
        draft_memory: bytes that copies of weights for drafts may take if no skip config is given;
            by default half of what is free. Under the rejection rule the text must not depend on
            free memory, and there is no limit. 0: no copies.
        draft_vocabulary: the only token ids that drafts may draw (see `layerskip.vocabulary`);
            their rows of the head are copied, once for each model.
        seed: of sampling; row i of a batch draws from stream (seed, i). None draws a seed from
            torch's default generator at every call; the stats report it.
        seeds: one seed per row instead, so that a row's text is the same alone and in any batch.
        costs: cost table of the controller; otherwise measured, or taken from the skip config.
        execution: "auto", "modules", "fused", "native" or "compiled", see `Sublayers`. Compiling
            pays for many calls on one model only; "auto" never does.
        clock: fills the rounds' `times`; on a GPU it should wait for the device.

    Settings left at None come from the skip config's `decoding` block, then from the defaults.
    """

    def __init__(
        self,
        skip: SkipConfig | str | os.PathLike[str] | None = None,
        *,
        lookup: bool | Lookup | None = None,
        assistant: Any = None,
        sources: Sequence[Source] = (),
        controller: str | Controller | None = None,
        max_draft_length: int | None = None,
        threshold: float | None = None,
        acceptance: str | None = None,
        enabled: bool | None = None,
        draft_memory: int | None = None,
        draft_vocabulary: Iterable[int] | None = None,
        seed: int | None = None,
        seeds: Sequence[int] | None = None,
        costs: CostTable | None = None,
        execution: str = "auto",
        clock: Callable[[], float] | None = None,
    ) -> None:
        if skip is not None and not isinstance(skip, SkipConfig):
            skip = SkipConfig.load(skip)
        if seed is not None and seeds is not None:
            raise ValueError("give seed (one for the batch) or seeds (one per row), not both")
        for given_seed in (seed, *(() if seeds is None else seeds)):
            if given_seed is not None and not hasattr(given_seed, "__index__"):
                raise TypeError(f"a seed must be an integer, got {given_seed!r}")
        stored = (skip and skip.decoding) or DecodingOptions()
        given = DecodingOptions(  # validates
            controller=controller if isinstance(controller, str) else None,
            max_draft_length=max_draft_length,
            threshold=threshold,
            acceptance=acceptance,  # type: ignore[arg-type]
            enabled=enabled,
            draft_vocabulary=draft_vocabulary,  # type: ignore[arg-type]
            lookup=lookup if not isinstance(lookup, Lookup) else None,
        )
        self.skip = skip
        self.controller: str | Controller = stored.controller or DEFAULT_CONTROLLER
        if controller is not None:
            self.controller = controller if isinstance(controller, str) else completed(controller)
        self.max_draft_length = given.max_draft_length or stored.max_draft_length
        self.threshold = stored.threshold if threshold is None else threshold
        self.acceptance = given.acceptance or stored.acceptance or "coupled"
        wanted = stored.enabled if enabled is None else enabled
        looks_up = stored.lookup if lookup is None else lookup
        self.lookup = Lookup() if looks_up is True else looks_up or None
        self.enabled = wanted is not False
        self.assistant = assistant
        self.sources = tuple(sources)
        self.automatic = skip is None
        if self.automatic and lookup is None:
            self.lookup = Lookup()
        if draft_memory is not None and not self.automatic:
            warnings.warn("draft_memory has no effect where drafts are named", stacklevel=2)
        self.draft_memory = draft_memory
        self.draft_vocabulary = given.draft_vocabulary or stored.draft_vocabulary
        self.seed = seed
        self.seeds = None if seeds is None else tuple(seeds)
        self.costs = costs
        self.execution = execution
        self.clock = clock

    def __repr__(self) -> str:
        how = self.controller if isinstance(self.controller, str) else type(self.controller)
        return f"LayerSkipDecoding({self.skip!r}, controller={how!r})"

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: Any = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerationOutput | Tensor:
        """Called by `model.generate(custom_generate=...)` with everything prepared.

        Raises:
            ValueError: an argument cannot be served; the message names it.
        """
        streamer = streamer or dropped_by_the_call(self, "streamer")  # it has the prompt
        if dropped_by_the_call(self, "assistant_model") is not None:
            warnings.warn(
                "assistant_model has no effect beside custom_generate: give the second model to "
                "LayerSkipDecoding(assistant=...)",
                stacklevel=2,
            )
        with ending(streamer):
            return self._decode(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config or model.generation_config,
                streamer,
                inputs_tensor,
                **model_kwargs,
            )

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None,
        stopping_criteria: StoppingCriteriaList | None,
        generation_config: GenerationConfig,
        streamer: Any,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> GenerationOutput | Tensor:
        config = generation_config  # the library's name for it, as of the others
        encoded = encoded_of(input_ids, inputs_tensor, model_kwargs)
        pictures = pictures_of(model, input_ids, config, model_kwargs)
        attention_mask = checked_mask(input_ids, config, model_kwargs)
        rows, width = input_ids.shape
        if streamer is not None and rows > 1:
            raise ValueError(f"a streamer serves one row, got {rows}; stream prompts one by one")
        criteria = list(stopping_criteria or [])
        eos = [c for c in criteria if type(c) is EosTokenCriteria]
        others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        seeds = self._seeds(rows, config.do_sample)
        request = Request(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=config.max_length - width,
            law=Law(logits_processor or [], do_sample=config.do_sample, rows=rows),
            keys=[stream_key(*seed) for seed in seeds],
            rejection=self.acceptance == "rejection",
            eos=frozenset(token for c in eos for token in c.eos_token_id.flatten().tolist()),
            stop=stop_of(others) if others else None,
            keep_scores=bool(config.return_dict_in_generate and config.output_scores),
            keep_logits=bool(config.return_dict_in_generate and config.output_logits),
            pictures=pictures,
            encoded=encoded,
            clock=self.clock,
        )
        decoder, costs = self.decoder(model, request)
        rounds = []
        for round_ in decoder.rounds():
            rounds.append(round_)
            if streamer is not None:
                streamer.put(torch.tensor(round_.tokens[0]))  # (n,)
        decoder.stats.seeds = tuple(seed[0] for seed in seeds)
        sequences = padded(input_ids, decoder.emitted, config)  # (B, W + n)
        if not config.return_dict_in_generate:
            return sequences
        return GenerationOutput(
            sequences=sequences,  # type: ignore[arg-type]  # the library says LongTensor
            scores=per_step(rounds, "scores", rows) if config.output_scores else None,  # type: ignore[arg-type]
            logits=per_step(rounds, "logits", rows) if config.output_logits else None,  # type: ignore[arg-type]
            stats=decoder.stats,
            rounds=[replace(round_, scores=None, logits=None) for round_ in rounds],
            costs=costs,
        )

    def decoder(self, model: Any, request: Request) -> tuple[Decoder, CostTable | None]:
        """The engine, ready to run a request on a model, and the costs its controller uses."""
        opened = sublayers_of(model, self.execution)
        if isinstance(opened, Whole) and request.encoded is not None:
            opened = opened.reading(request.encoded)
        sampling = request.law.do_sample
        if not self.enabled:
            return self._plain(opened, request), None
        opened, sources = self._sources(opened, rejection=request.rejection and sampling)
        if not sources:
            return self._plain(opened, request), None
        brought = self.costs
        if brought is None and self.skip is not None and self.assistant is None:
            brought = stored(self.skip, opened, request.input_ids.shape[0])
        costs = self._tables(opened, sources, request, brought)
        controller = self.controller
        if isinstance(controller, str):
            controller = make_controller(
                controller,
                max_draft_length=self.max_draft_length,
                threshold=self.threshold,
                costs=[table or CostTable(1.0, (1.0,)) for table in costs],
                priors=[source.prior for source in sources],
                sampling=sampling,
            )
        longest = self.max_draft_length or LONGEST_DRAFT
        decoder = Decoder(opened, sources, controller, request, max_draft_length=longest)
        last, (rows, _) = costs[-1], request.input_ids.shape
        context = int(request.attention_mask.sum()) // rows
        return decoder, None if last is None else last.at(context, rows)

    def _sources(self, opened: Sublayers, *, rejection: bool) -> tuple[Sublayers, list[Source]]:
        """The model, perhaps with a draft vocabulary, and its sources, the own draft last."""
        sources: list[Source] = [] if self.lookup is None else [self.lookup]
        sources += self.sources
        if self.assistant is not None:
            sources.append(self._assistant(opened))
        own = self._own(opened, by_memory=not rejection)
        if sources == [self.lookup]:
            warn_of_loading(opened, own)
        if own.skip is not None:
            skip = own.skip.resolve(opened.num_layers)
            own_hash = opened.weights.fingerprint() if skip.model_hash else None
            skip.warn_if_foreign(getattr(opened.model, "name_or_path", None) or None, own_hash)
            if self.draft_vocabulary is not None:
                opened = opened.trimmed(self.draft_vocabulary)
            opened.weights.blocks(skip)  # raises here, before anything is decoded
            sources.append(source_of(opened, skip))
        return opened, sources

    def _own(self, opened: Sublayers, *, by_memory: bool) -> AutomaticDraft:
        """The model's own draft, or why it has none."""
        if not self.automatic:
            return AutomaticDraft(self.skip, None)
        return automatic_draft(opened, self.draft_memory, by_memory=by_memory)

    def explain(self, model: Any) -> str:
        """The sources of drafts for a model, and why there are no better ones; a line each."""
        opened = sublayers_of(model, self.execution)
        lines = [f"passes: {opened.describe()}"]
        if not self.enabled:
            return "\n".join([*lines, "drafts: none, as enabled is False"])
        if self.lookup is not None:
            lines.append("drafts: looked up in the text so far, for nothing")
        lines += [f"drafts: by {type(source).__name__}" for source in self.sources]
        if self.assistant is not None:
            official = isinstance(self._assistant(opened), Official)
            what = "the model's official assistant" if official else "a second model"
            lines.append(f"drafts: by {what}")
        own = self._own(opened, by_memory=self.acceptance == "coupled")
        if own.skip is not None:
            nbytes = in_words(opened.weights.nbytes(own.skip))
            lines.append(f"drafts: by the model itself, {own.skip!r}, whose weights take {nbytes}")
        elif own.reason is not None:
            lines.append(f"no drafts by the model in 8 bits: {own.reason}")
        if not opened.exact:
            lines.append(
                "texts equal plain decoding's up to near-ties: passes are not native, and "
                "libraries sum in another order beside other tokens"
            )
        return "\n".join(lines)

    def prepare(self, model: Any, *, rows: int = 1, seconds: float = 2.0, **sampling: Any) -> None:
        """Make copies and measure costs now instead of in the first calls.

        Args:
            rows: of later batches.
            seconds: about how long measuring may take.
            sampling: do_sample, temperature, top_k and top_p of later calls, as for `decode`.
        """
        opened = sublayers_of(model, self.execution)
        opened, sources = self._sources(opened, rejection=False)
        if not sources or self.controller != DEFAULT_CONTROLLER:
            return
        ids = torch.ones(rows, 4, dtype=torch.long, device=opened.device)  # (B, 4)
        law = _law(opened.model, rows, (), **({"do_sample": False} | sampling))
        keys = [stream_key(0, row) for row in range(rows)]
        request = Request(ids, torch.ones_like(ids), max_new_tokens=2, law=law, keys=keys)
        with torch.no_grad():
            cost_tables(opened, sources, request, seconds=seconds)

    def _assistant(self, target: Sublayers) -> Assistant | Official:
        """The second model as a source, limited to the draft vocabulary."""
        if isinstance(self.assistant, str | os.PathLike):
            found = load_assistant(self.assistant, dtype=target.dtype)
            self.assistant = found.to(target.device)
        opened = sublayers_of(self.assistant, self.execution)
        if isinstance(opened, Whole) and opened.both:
            opened = opened.reading_of(target)
        found = second_model(target, opened, self.draft_vocabulary)
        if isinstance(found, Assistant):
            warn_of_vocabularies(target.model, opened.model)
        return found

    @staticmethod
    def _plain(model: Sublayers, request: Request) -> Decoder:
        nothing = make_controller("fixed", costs=CostTable(1.0, (1.0,)))
        return Decoder(model, [], nothing, request, max_draft_length=0)

    def _tables(
        self,
        model: Sublayers,
        sources: Sequence[Source],
        request: Request,
        brought: CostTable | None,
    ) -> Sequence[Costs | None]:
        """The costs of each source; None where the controller does not need them."""
        if brought is not None:
            free = replace(brought, draft=0.0)
            return [free if source.known else brought for source in sources]
        if self.controller != DEFAULT_CONTROLLER:
            return [None] * len(sources)
        if request.rejection and request.law.do_sample:
            # measured costs would let a clock decide the text
            rows = request.input_ids.shape[0]
            return [by_bytes(model, source, rows) for source in sources]
        return cost_tables(model, sources, request)

    def _seeds(self, rows: int, do_sample: bool) -> list[tuple[int, int]]:
        """(seed, row) of each row's noise stream; none for greedy decoding."""
        if not do_sample:
            return []
        if self.seeds is not None:
            if len(self.seeds) != rows:
                raise ValueError(f"seeds must hold one seed per row, {rows}; got {len(self.seeds)}")
            return [(seed, 0) for seed in self.seeds]
        seed = self.seed
        if seed is None:
            seed = int(torch.randint(2**31, ()))
        return [(seed, row) for row in range(rows)]


def generate(
    model: Any,
    inputs: Tensor | Mapping[str, Any],
    *,
    skip: SkipConfig | str | os.PathLike[str] | None = None,
    streamer: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    **kwargs: Any,
) -> GenerationOutput:
    """`model.generate()` with self-speculation, and all arguments that its custom path drops.

    Args:
        model: a supported causal language model.
        inputs: token ids (B, W), left-padded, or what comes out of a tokenizer or, with pictures,
            of a processor.
        skip: as for `LayerSkipDecoding`, whose other settings may be given as keywords too.
        streamer: gets the prompt, then new tokens as 1-D tensors, a round at a time; one row only.
            It is ended whatever happens.
        tokenizer: needed for `stop_strings`.
        assistant_tokenizer: that of the second model, which is then compared with `tokenizer`.
        **kwargs: settings of `LayerSkipDecoding`, everything else goes to `model.generate()`.
    """
    with ending(streamer):
        settings = {name: kwargs.pop(name) for name in _SETTINGS & kwargs.keys()}
        decoding = LayerSkipDecoding(skip, **settings)
        if assistant_tokenizer is not None:
            if tokenizer is None:
                raise ValueError("assistant_tokenizer needs the model's own; pass tokenizer=")
            check_vocabularies(tokenizer, assistant_tokenizer)
        ends = StoppingCriteriaList(stopping_criteria or [])
        if stop_strings is not None:
            if tokenizer is None:
                raise ValueError("stop_strings needs the tokenizer; pass tokenizer=")
            ends.append(StopStringCriteria(tokenizer, stop_strings))
        given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
        if "input_ids" in given:  # the library checks the rest
            check_ids(given["input_ids"])
        if kwargs.get("synced_gpus"):
            raise ValueError("synced_gpus is not supported: ranks would draft different lengths")
        if kwargs.pop("assistant_model", None) is not None:
            raise ValueError("assistant_model is not supported; give assistant= for a second model")
        output = model.generate(
            **given,
            custom_generate=partial(decoding._decode, streamer=streamer),
            streamer=streamer,
            stopping_criteria=ends,
            **({"return_dict_in_generate": True} | kwargs),
        )
        return output  # type: ignore[no-any-return]


_SETTINGS = inspect.signature(LayerSkipDecoding).parameters.keys() - {"skip"}


def decode(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    skip: SkipConfig | str | os.PathLike[str] | None = None,
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
    """Decode text round by round, in token ids; the engine without `generate()`.

    Prompts with pictures need `generate()`, which runs the vision tower.

    Args:
        input_ids: (B, W), left-padded where attention_mask (B, W) is 0.
        skip, **settings: as for `LayerSkipDecoding`.
        temperature, top_k, top_p: of sampling. None means the same as in `model.generate()`: the
            value of the model's generation config, then the library's default, which has a top_k of
            50. Give top_k=0 and top_p=1.0 for the full softmax.
        logits_processor: run before temperature, top_k and top_p.
        keep_scores: keep processed scores and raw logits of every emitted token in the rounds.
        eos_token_id: tokens that end a row; the model's own by default.

    Yields:
        Round 0 (the prefill's token), then each round.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    check_ids(input_ids)
    model = unwrapped(model)
    decoding = LayerSkipDecoding(skip, **settings)
    rows = input_ids.shape[0]
    law = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    request = Request(
        input_ids=input_ids,
        attention_mask=checked_mask(input_ids, model.generation_config, {"attention_mask": mask}),
        max_new_tokens=max_new_tokens,
        law=_law(model, rows, logits_processor, do_sample=do_sample, **law),
        keys=[stream_key(*seed) for seed in decoding._seeds(rows, do_sample)],
        rejection=decoding.acceptance == "rejection",
        eos=end_tokens(model, eos_token_id),
        keep_scores=keep_scores,
        keep_logits=keep_scores,
        clock=decoding.clock,
    )
    with torch.no_grad():
        decoder, _ = decoding.decoder(model, request)
        rounds = decoder.rounds()
    while True:
        with torch.no_grad():  # not around the yield: the caller's own grad mode stays
            round_ = next(rounds, None)
        if round_ is None:
            return
        yield round_


def _law(
    model: Any, rows: int, processors: Sequence[Any], *, do_sample: bool, **sampling: Any
) -> Law:
    """The law of processors and sampling arguments, as `model.generate()` makes it."""
    own = warpers(**sampling_of(model, **sampling)) if do_sample else ()
    return Law([*processors, *own], do_sample=do_sample, rows=rows)
