"""Grammars that a text is kept to: logits processors made of a JSON schema or a regular expression.

What they allow is computed by llguidance, or by xgrammar. Only new tokens are of the grammar's
text, not the prompt. Letters: B rows, W tokens of a row so far, V vocabulary of the scores.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Library = Literal["llguidance", "xgrammar"]
SEPARATORS = ", ", ": "
"""What JSON has between two items, and behind a key: those of `json.dumps`."""


class Grammar(ABC):
    """A text's place in a grammar (see `layerskip.decoding.laws.Stateful`).

    Ends of text are allowed exactly where the grammar may end, and nothing else behind its end.

    It is also a logits processor for `generate()` of transformers itself, where one object serves
    one thread.

    Args:
        compiled: the grammar, as the library has it.
        eos: tokens that end a text.
        tokenizer: which the grammar was made for.
    """

    def __init__(self, compiled: Any, eos: Sequence[int], tokenizer: Any) -> None:
        self.compiled, self.eos, self.tokenizer = compiled, eos, tokenizer
        self.matcher = self._begin()
        self._behind = 0  # tokens behind the grammar's end, which the matcher is not told
        self._called: list[list[int]] = []  # the rows that `__call__` was asked about last
        self._width = 0  # how many of their tokens are prompt
        self._rows: list[Grammar] = []

    def start(self) -> Grammar:
        """The same grammar at the beginning of a text."""
        return type(self)(self.compiled, self.eos, self.tokenizer)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) behind the tokens so far (B, W), as any logits processor.

        A text begins at the first call with its prompt, and grows by a token from call to call.

        Raises:
            ValueError: it did not.
        """
        rows, last, width = input_ids.tolist(), self._called, self._width
        begun = [row[:width] for row in rows] == [row[:width] for row in last]
        if not begun or len(rows[0]) == width:
            self._width, self._rows = len(rows[0]), [self.start() for _ in rows]
        elif [row[:-1] for row in rows] != last:
            raise ValueError(
                "a grammar must see all rows grow by one token at a time; leave out beams and "
                "assistants, and give each call of generate() a grammar.start() of its own"
            )
        else:
            for state, row in zip(self._rows, rows, strict=True):
                state.advance(row[-1])
        self._called = rows
        processed = [state.mask(each) for state, each in zip(self._rows, scores, strict=True)]
        return torch.stack(processed)  # (B, V)

    def forced(self) -> list[int]:
        """Tokens that follow here whatever is written, as far as they are known; perhaps others
        that spell the same."""
        return [] if self._behind else self._jump()

    def advance(self, token: int) -> None:
        """Goes on by a token; behind one that is not allowed the text has ended."""
        if self._behind or token in self.eos or not self._accepts(token):
            self._behind += 1

    def rollback(self, count: int) -> None:
        """Takes back the last tokens."""
        behind = min(count, self._behind)
        self._behind -= behind
        if count > behind:
            self._take_back(count - behind)

    def mask(self, scores: Tensor) -> Tensor:
        """Scores (V,) with -inf for every token that is not allowed here.

        V may be larger than the tokenizer's vocabulary, as padded heads are, or smaller.
        """
        allowed = np.zeros(len(scores), dtype=bool)  # (V,)
        if not self._behind:
            bits = np.unpackbits(self._bits(), bitorder="little")[: len(scores)]
            allowed[: len(bits)] = bits
        ends = [token for token in self.eos if token < len(scores)]
        allowed[ends] = self._behind > 0 or self._may_end()
        here = torch.from_numpy(allowed).to(scores.device)  # (V,)
        return scores.masked_fill(~here, -float("inf"))

    @abstractmethod
    def _begin(self) -> Any:
        """The library's matcher at the beginning of a text."""

    @abstractmethod
    def _accepts(self, token: int) -> bool:
        """Advance the matcher, if the token is allowed."""

    @abstractmethod
    def _take_back(self, count: int) -> None: ...

    @abstractmethod
    def _jump(self) -> list[int]:
        """`forced`, before the grammar's end."""

    @abstractmethod
    def _bits(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Of every token whether it is allowed, eight in a byte, the lowest bit first."""

    @abstractmethod
    def _may_end(self) -> bool: ...


class _Llguidance(Grammar):
    def _begin(self) -> Any:
        return self.compiled.deep_copy()

    def _accepts(self, token: int) -> bool:
        return bool(self.matcher.try_consume_tokens([token]))

    def _take_back(self, count: int) -> None:
        self.matcher.rollback(count)

    def _jump(self) -> list[int]:
        tokens: list[int] = self.matcher.compute_ff_tokens()
        return tokens

    def _bits(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        if self.matcher.is_error():
            raise ValueError(f"the grammar went wrong: {_line(self.matcher.get_error())}")
        return bits

    def _may_end(self) -> bool:
        return bool(self.matcher.is_accepting())


class _Xgrammar(Grammar):
    def _begin(self) -> Any:
        from xgrammar import GrammarMatcher

        return GrammarMatcher(self.compiled)

    def _accepts(self, token: int) -> bool:
        return bool(self.matcher.accept_token(token))

    def _take_back(self, count: int) -> None:
        self.matcher.rollback(count)

    def _jump(self) -> list[int]:
        # it forces characters only: one token alone is allowed almost nowhere
        text = self.matcher.find_jump_forward_string()
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _bits(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        from xgrammar import allocate_token_bitmask

        bits = allocate_token_bitmask(
            1, self.compiled.tokenizer_info.vocab_size
        )  # (1, words) int32
        self.matcher.fill_next_token_bitmask(bits)
        allowed: np.ndarray[Any, np.dtype[np.uint8]] = bits[0].numpy().view(np.uint8)
        return allowed

    def _may_end(self) -> bool:
        return bool(self.matcher.is_completed())


def response_format(
    given: Mapping[str, Any], tokenizer: Any, *, eos: Sequence[int] | None = None
) -> list[Grammar]:
    """What a `response_format` of OpenAI's interface asks for, as logits processors; text: none.

    Raises:
        ValueError: it is none, or as for `json_schema`.
    """
    match given:
        case {"type": "text", **more} if not more:
            return []
        case {"type": "json_object", **more} if not more:
            schema: dict[str, Any] = {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema), **about}, **more} if (
            not more and about.keys() <= {"name", "description", "strict"}
        ):
            pass
        case _:
            raise ValueError(
                'response_format must be {"type": "json_schema", "json_schema": {"schema": ...}} '
                "(there with a name, a description and strict, if you like), "
                '{"type": "json_object"} or {"type": "text"}'
            )
    return [json_schema(schema, tokenizer, eos=eos)]


def json_schema(
    schema: Mapping[str, Any] | str,
    tokenizer: Any,
    *,
    eos: int | Sequence[int] | None = None,
    whitespace: bool = False,
    library: Library = "llguidance",
) -> Grammar:
    """A logits processor that keeps new text to JSON of a schema.

    Give it as `logits_processor=[...]` to `layerskip.generate`, `decode`, or `model.generate()`,
    with or without `LayerSkipDecoding`. With it, one object serves any number of threads.

    Args:
        schema: a JSON schema, as a mapping or as JSON.
        tokenizer: the model's fast tokenizer.
        eos: tokens that end a text; by default the tokenizer's.
        whitespace: whether there may be any between tokens of JSON; else it is written in one
            line, as `json.dumps` does.
        library: which one computes what is allowed.

    Raises:
        ValueError: the schema is none, or the library is not installed or cannot serve it or the
            tokenizer.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"a JSON schema must be JSON: {error}") from error
    if not isinstance(schema, Mapping):
        kind = type(schema).__name__
        raise ValueError(f"a JSON schema must be an object, such as {{}} for any, got a {kind}")
    schema = dict(schema)
    ends = _ends(tokenizer, eos)
    if library == "xgrammar":
        if whitespace:
            how: dict[str, Any] = {}
        else:
            how = {"any_whitespace": False, "separators": SEPARATORS}
        text = json.dumps(schema)
        return _with_xgrammar("compile_json_schema", text, tokenizer, ends, **how)
    item, key = SEPARATORS
    strict = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    compiler = _llguidance(library).LLMatcher
    grammar = compiler.grammar_from_json_schema(schema, overrides={} if whitespace else strict)
    return _with_llguidance(grammar, tokenizer, ends)


def regex(
    pattern: str,
    tokenizer: Any,
    *,
    eos: int | Sequence[int] | None = None,
    library: Library = "llguidance",
) -> Grammar:
    """A logits processor that keeps new text, as a whole, to a regular expression.

    Arguments and errors are those of `json_schema`.
    """
    ends = _ends(tokenizer, eos)
    if library == "xgrammar":
        return _with_xgrammar("compile_regex", pattern, tokenizer, ends)
    grammar = _llguidance(library).LLMatcher.grammar_from_regex(pattern)
    return _with_llguidance(grammar, tokenizer, ends)


def _ends(tokenizer: Any, eos: int | Sequence[int] | None) -> tuple[int, ...]:
    given = tokenizer.eos_token_id if eos is None else eos
    ends = (given,) if isinstance(given, int) else tuple(given or ())
    if not ends:
        raise ValueError(
            "a grammar needs a token that ends a text, the tokenizer has none; give eos="
        )
    return ends


def _llguidance(library: str) -> Any:
    if library != "llguidance":
        raise ValueError(f"library must be llguidance or xgrammar, got {library!r}")
    try:
        import llguidance
    except ImportError as error:
        raise _missing("llguidance", "grammars") from error
    return llguidance


def _missing(library: str, extra: str) -> ValueError:
    return ValueError(f"{library} is not installed; run pip install 'layerskip[{extra}]'")


def _with_llguidance(grammar: str, tokenizer: Any, eos: tuple[int, ...]) -> Grammar:
    from llguidance import LLMatcher

    first = LLMatcher(_for_llguidance(tokenizer, eos), grammar, log_level=0)
    if first.is_error():
        raise ValueError(f"llguidance refuses the grammar: {_line(first.get_error())}")
    return _Llguidance(first, eos, tokenizer)


@lru_cache(maxsize=4)  # it takes a second for large vocabularies
def _for_llguidance(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, eos_token=list(eos))


def _with_xgrammar(
    method: str, text: str, tokenizer: Any, eos: tuple[int, ...], **how: Any
) -> Grammar:
    try:
        import xgrammar  # noqa: F401
    except ImportError as error:
        raise _missing("xgrammar", "xgrammar") from error
    try:
        compiled = getattr(_for_xgrammar(tokenizer, eos), method)(text, **how)
    except RuntimeError as error:
        raise ValueError(f"xgrammar refuses the grammar: {_line(str(error))}") from error
    return _Xgrammar(compiled, eos, tokenizer)


@lru_cache(maxsize=4)
def _for_xgrammar(tokenizer: Any, eos: tuple[int, ...]) -> Any:
    from xgrammar import GrammarCompiler, TokenizerInfo

    return GrammarCompiler(TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=list(eos)))


def _line(text: str) -> str:
    return " ".join(text.split())
