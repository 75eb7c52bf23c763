"""Ranks tokens for a draft vocabulary, and checks that two models share a vocabulary.

Few tokens make up most of any text. A draft that reads only their rows of the head costs less and
proposes nearly the same tokens (FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

PADDING = 0.01
"""Maximum size difference of heads with one tokenizer, due to padding, as a share of the size."""


def ranked(
    texts: Iterable[Sequence[int] | Tensor], vocabulary: int, *, ends: Iterable[int] = ()
) -> Tensor:
    """Rank every token id by its use in a draft vocabulary, most useful first; (V,) int64.

    First come `ends`, without which drafts would continue after the end of a text, then the others
    by frequency. Tokens of equal frequency are ordered by id: a tokenizer learns its merges in that
    order, which is roughly the order of frequency.

    Args:
        texts: token ids, (T,) or (1, T) each, from texts like those to be generated.
        vocabulary: V, the model's `config.vocab_size`.
        ends: tokens that end a text, such as `model.generation_config.eos_token_id`.

    Raises:
        ValueError: a token is not in 0..V-1.
    """
    counts = torch.zeros(vocabulary, dtype=torch.long)  # (V,)
    for text in texts:
        tokens = torch.as_tensor(text, dtype=torch.long).flatten().cpu()
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            raise ValueError(
                f"texts must hold tokens in 0..{vocabulary - 1}, got {int(tokens.min())} to "
                f"{int(tokens.max())}; encode them with the model's own tokenizer"
            )
        counts += torch.bincount(tokens, minlength=vocabulary)
    first = list(ends)
    if first and not 0 <= min(first) <= max(first) < vocabulary:
        raise ValueError(f"ends must be tokens in 0..{vocabulary - 1}, got {sorted(first)}")
    counts[first] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)


def check_vocabularies(tokenizer: Any, other: Any) -> None:
    """Raise an error if any token of a second model's tokenizer differs.

    Either may have extra tokens after the other's last one; those are never drafted.

    Args:
        tokenizer, other: transformers tokenizers of the target and of the second model.

    Raises:
        ValueError: they differ; the message names the first difference.
    """
    ours, theirs = (
        {token: text for text, token in each.get_vocab().items()} for each in (tokenizer, other)
    )
    last = min(max(ours), max(theirs))
    wrong = [token for token in range(last + 1) if ours.get(token) != theirs.get(token)]
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"the second model has another vocabulary: {len(wrong)} of {last + 1} tokens differ, "
            f"the first is {first}, {ours.get(first)!r} here and {theirs.get(first)!r} there; "
            "give assistant=layerskip.UniversalAssistant(model, tokenizer, its_tokenizer)"
        )


def hash_of(tokenizer: Any) -> str:
    """A hash of a tokenizer's tokens and their ids, by which files of token ids name it."""
    tokens = sorted((token, text) for text, token in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def warn_of_vocabularies(model: Any, other: Any) -> None:
    """Warn if the configurations of two models suggest different vocabularies.

    Models do not include their tokenizers, so this is no proof: heads may be padded, and a chat
    model may have additional end tokens.

    Args:
        model, other: transformers models, the target and the second model.
    """
    ours, theirs = model.config.get_text_config(), other.config.get_text_config()
    sizes = sorted((ours.vocab_size, theirs.vocab_size))
    signs = []
    if sizes[1] - sizes[0] > PADDING * sizes[1]:
        signs.append(f"it has {theirs.vocab_size} tokens, not {ours.vocab_size}")
    for name in ("bos_token_id", "eos_token_id"):
        here, there = (_ids(each, name) for each in (model, other))
        if here and there and not here & there:
            signs.append(f"its {name} is {min(there)}, not {min(here)}")
    if signs:
        warnings.warn(
            f"the second model may have another vocabulary, and would draft badly: "
            f"{'; '.join(signs)}; layerskip.check_vocabularies compares the tokenizers, and a "
            "layerskip.UniversalAssistant may have its own",
            stacklevel=2,
        )


def _ids(model: Any, name: str) -> set[int]:
    """Return the ids of one kind of special token; a model may have several."""
    ids = getattr(getattr(model, "generation_config", None), name, None)
    ids = getattr(model.config.get_text_config(), name, None) if ids is None else ids
    return set() if ids is None else {ids} if isinstance(ids, int) else {*ids}
