"""Tokenizers of GGUF files, and the tokens that end a text.

A file means what llama.cpp reads from it. Byte-level vocabularies (BPE) are built here, since
transformers splits texts by a pattern of its own if it does not know the file's. Those of
SentencePiece are left to transformers. Metadata that changes a text is read, or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from layerskip.files.gguf_contents import read_gguf

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHERS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_CASES = (  # letters with two cases, without mathematical ones and those of newer alphabets
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{1FBE}"
    r"\x{2D00}-\x{2D2D}\x{A78F}-\x{AB6F}\x{10570}-\x{105BF}\x{10D50}-\x{10D85}"
    r"\x{16E40}-\x{16E7F}\x{1D400}-\x{1DFFF}]]"
)
_CJK = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_LLAMA3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": (_WORDS,),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": (r"\p{N}", _WORDS),
    f"{_LLAMA3} dbrx smaug-bpe chatglm-bpe glm4": (rf"{_SUFFIX}|{_WORD}|\p{{N}}{{1,3}}|{_OTHERS}",),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": (
        rf"{_SUFFIX}|{_WORD}|\p{{N}}|{_OTHERS}",
    ),
    "seed-coder": (rf"{_SUFFIX}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",),
    "viking": (r" ?[^(\s|.,!?…。\x{FF0C}、।\x{6D4}،)]+", r"\p{N}"),
    "deepseek-llm": (
        *(r"[\r\n]", rf"\s?{_CASES}+"),
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
        *(r"\s+$", _CJK, r"\p{N}+"),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm": (
        *(r"\p{N}{1,3}", r"[\x{3040}-\x{30FF}\x{4E00}-\x{9FA5}]+"),
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    ),
    "qwen35": (
        rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    "gpt-4o llama4 kanana2": (
        rf"{_CASED}{_SUFFIX}?|{_CAPITALS}{_SUFFIX}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ),
    "tekken": (rf"{_CASED}|{_CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",),
}
_SPLITS = {name: patterns for names, patterns in _PATTERNS.items() for name in names.split()}
"""The patterns that split a text one after another, by `tokenizer.ggml.pre`."""
_WHOLE = f"{_LLAMA3} tekken".split()
"""Those that take words of the vocabulary whole, whatever the merges, and begin with BOS."""

_READ = (
    *("model", "pre", "tokens", "token_type", "merges", "scores"),
    *("add_bos_token", "add_eos_token", "add_space_prefix"),
)
_IDLE = ("precompiled_charsmap", "remove_extra_whitespaces", "token_type_count")
"""Keys that change no text with these kinds of vocabularies, whatever they say."""
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that are never split
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_NAMES = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
    *("<|end_of_text|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
    *("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
"""Tokens that always end a text. Files of chat models often name only one, and not the turn's."""


def gguf_tokenizer(path: Path) -> tuple[Any, list[int]]:
    """Load the tokenizer that a file describes, and the tokens that end a text.

    Raises:
        ValueError: the tokenizer is not supported. The library may raise any other error.
    """
    arrays = ("tokens", "token_type", "merges")
    metadata = read_gguf(path, [f"tokenizer.ggml.{name}" for name in arrays]).metadata
    prefix = "tokenizer.ggml."
    given = {k.removeprefix(prefix): each for k, each in metadata.items() if k.startswith(prefix)}
    for key in given.keys() - {*_READ, *_IDLE}:
        if given[key] and not key.endswith("_token_id"):
            raise ValueError(f"{prefix}{key} = {given[key]!r} is not supported")
    tokens = given["tokens"]
    types = given.get("token_type") or [1] * len(tokens)
    ids = {token: number for number, token in enumerate(tokens)}
    ends = {ids[name] for name in _END_NAMES if name in ids}
    ends |= {given[f"{name}_token_id"] for name in _ENDS if f"{name}_token_id" in given}
    if "</s>" in ids and types[ids["</s>"]] == _CONTROL:  # elsewhere it is a tag of HTML
        ends.add(ids["</s>"])
    wrong = [number for number in ends if number not in range(len(tokens))]
    if wrong:
        raise ValueError(f"it has {len(tokens):,} tokens, and none is the end token {wrong[0]}")
    if given["model"] == "gpt2":
        tokenizer = _byte_level(given, types)
        tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    else:
        tokenizer = PreTrainedTokenizerFast(gguf_file=path.name, name_or_path=str(path.parent))
        _set_prefix(tokenizer.backend_tokenizer, given.get("add_space_prefix", True))
    special = [AddedToken(tokens[end], normalized=False, special=True) for end in ends]
    tokenizer.backend_tokenizer.add_special_tokens(special)
    # Where a pad token is missing, the first one serves.
    return tokenizer, sorted(ends, key=lambda end: (end != given.get("eos_token_id"), end))


def _byte_level(given: Mapping[str, Any], types: list[int]) -> Any:
    """The tokenizer of a byte-level vocabulary."""
    tokens, pre = given["tokens"], given.get("pre", "default")
    if pre not in _SPLITS:
        raise ValueError(f"tokenizer.ggml.pre = {pre!r} is not supported; load the model's folder")
    merges = [tuple(pair.split(" ", 1)) for pair in given["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    fast = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre in _WHOLE))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, fast.add_special_tokens), (_USER_DEFINED, fast.add_tokens)):
        chosen = [token for token, each in zip(tokens, types, strict=True) if each == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in chosen])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    found = {name: given.get(f"{key}_token_id") for name, key in names.items()}
    special = {f"{name}_token": tokens[id_] for name, id_ in found.items() if id_ is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        add_bos_token="bos_token" in special and given.get("add_bos_token", pre in _WHOLE),
        add_eos_token="eos_token" in special and given.get("add_eos_token", False),
        **special,
    )


def _set_prefix(fast: Any, wanted: bool) -> None:
    """Add a space in front of a text, or not. transformers does so by the architecture."""
    if isinstance(fast.pre_tokenizer, pre_tokenizers.Metaspace) and not wanted:
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        fast.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
