"""The engine as a model class of lm-evaluation-harness, `--model layerskip`.

Tokens, templates and windows are those of the harness's own class `hf`; this class computes texts
and scores, many at once, with drafts. Versions of the harness with plug-ins find it by its entry
point; for other versions this file is the command: `python -m layerskip.bench.lm_eval run ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models import utils
from lm_eval.models.huggingface import HFLM, tqdm
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from layerskip.api.loading import load
from layerskip.serving.history import StopStrings
from layerskip.serving.requests import Piece, TextRequest
from layerskip.serving.scheduler import Serving

_LAW = {"do_sample", "temperature", "top_k", "top_p", "min_p"}


@register_model("layerskip")
class LayerSkipLM(HFLM):  # type: ignore[misc]
    """A model run by this engine, for evaluations.

    Args:
        pretrained, dtype, device, trust_remote_code: as for `layerskip.api.loading.load`.
        batch_size: number of texts at once.
        draft: False decodes plainly; scores and texts are the same.
        assistant: name of a second model that drafts.
        seed: sampling seed; request i uses `seed + i`.
        **kwargs: further arguments of `HFLM`.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 16,
        draft: bool = True,
        assistant: str | None = None,
        seed: int = 0,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        # The harness requests "cuda:0" if the user has not chosen a device.
        place = device if torch.cuda.is_available() or device == "cpu" else "auto"
        where: dict[str, Any] = {"device": place or "auto", "dtype": dtype}
        loaded = load(str(pretrained), **where, trust_remote_code=trust_remote_code)
        rows = 16 if str(batch_size).startswith("auto") else int(batch_size)
        kwargs |= {"tokenizer": loaded.tokenizer, "backend": "causal", "batch_size": rows}
        super().__init__(pretrained=loaded.model, **kwargs)
        loaded.store_halves()
        settings: dict[str, Any] = {"enabled": draft, "skip": loaded.skip_config()}
        if draft and assistant is not None:
            settings["assistant"] = load(assistant, **where).model
        self._serving = Serving(loaded.model, max_rows=rows, max_queue=sys.maxsize, **settings)
        self._seed = seed

    @property
    def max_length(self) -> int:
        """Maximum context of a score; there is also room for the scored token and one more."""
        return min(int(super().max_length), self._serving.max_tokens - 2)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue contexts; each text is cut before its first stop string.

        Raises:
            ValueError: a task has sampling settings that are not known here.
        """
        end = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        tasks, stops = list[TextRequest](), list[list[str]]()
        for number, (context, given) in enumerate(each.args for each in requests):
            how = normalize_gen_kwargs(given, self.max_gen_toks)
            stops.append(handle_stop_sequences(how.pop("until", None), eos=end))
            most = how.pop("max_gen_toks")
            if unknown := how.keys() - _LAW:
                raise ValueError(f"generation_kwargs may hold {_LAW} here, not {unknown}")
            prompt = self.tok_encode(context, left_truncate_len=self.max_length - most)
            stop = StopStrings(self.tokenizer, [*filter(None, stops[-1])], len(prompt))
            law = how if how.get("do_sample") else {}
            tasks.append(TextRequest(prompt, most, seed=self._seed + number, stop=stop, **law))
        texts = []
        answers = self._ask(tasks, "generate_until", disable_tqdm)
        for request, pieces, strings in zip(requests, answers, stops, strict=True):
            text = self.tok_decode([token for piece in pieces for token in piece.tokens])
            texts.append(utils.postprocess_generated_text(text, strings, self.think_end_token))
            self.cache_hook.add_partial("generate_until", request.args, texts[-1])
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each continuation, its log-probability, and whether greedy decoding gives it."""
        tasks = []
        for _, context, continuation in requests:
            tokens = (context + continuation)[-(self.max_length + 1) :]
            first = len(tokens) - len(continuation)
            tasks.append(TextRequest(tokens, 1, top_logprobs=1, prompt_logprobs=first))
        scores = []
        answers = self._ask(tasks, "loglikelihood", disable_tqdm)
        for (pair, _, continuation), pieces in zip(requests, answers, strict=True):
            each = [values for piece in pieces for values in piece.prompt_logprobs]
            own = [values[token] for token, values in zip(continuation, each, strict=True)]
            greedy = all(one == max(some.values()) for one, some in zip(own, each, strict=True))
            scores.append((sum(own), greedy))
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, scores[-1])
        return scores

    def _ask(self, tasks: Sequence[TextRequest], what: str, quiet: bool) -> list[list[Piece]]:
        """Run requests and collect their pieces; common prefixes are adjacent, to share caches."""
        answers: list[list[Piece]] = [[] for _ in tasks]
        with tqdm(total=len(tasks), desc=f"Running {what} requests", disable=quiet) as bar:

            def tell(pieces: list[Piece], piece: Piece) -> None:
                pieces.append(piece)
                bar.update(piece.reason is not None)

            for task, pieces in sorted(
                zip(tasks, answers, strict=True), key=lambda each: [*each[0].prompt]
            ):
                self._serving.submit(task, partial(tell, pieces))
            while self._serving.step():
                pass
        for pieces in answers:
            if pieces[-1].reason == "error":
                raise RuntimeError(f"a text could not be finished: {pieces[-1].error}")
        return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
