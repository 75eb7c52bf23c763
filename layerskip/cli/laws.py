"""The laws command: the likeliest tokens after every few tokens of texts, stored in a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from layerskip.cli.flags import AsJson, Loading, Quiet, flag, text_in
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk, to_json
from layerskip.registry import named


def laws(
    *,
    text: list[Path] = flag(
        "UTF-8 text to read; repeatable: of the same words, the last text counts.",
        "FILE",
        default=...,
    ),
    output: Path = flag("File to write; replaced if it is there.", "FILE", default=...),
    places: int | None = flag(
        "Keep at most N places, 272 bytes each.  [default: 16384]", "N", min=1
    ),
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Read your texts with a model, and keep what it finds likely after every four tokens.

    With `--laws FILE`, `generate`, `chat`, `run`, `serve` and `benchmark` draft from the file:
    trees of the tokens that are likely after the same four. The file serves this model only.
    """
    texts = [text_in("--text", each) for each in text]
    talk = Talk(quiet)
    loaded = open_model(loading, talk)
    with open_passes(loaded, loading, talk) as opened:
        kept, read = named("store", "laws")(places), 0
        for path, content in zip(text, texts, strict=True):
            tokens = loaded.tokenizer(content, add_special_tokens=False)["input_ids"]
            kept.learn(opened, tokens, partial(_tell, talk, path))
            read += len(tokens)
    talk.progress("")
    kept.save(output)
    size = output.stat().st_size
    talk.say(
        f"{read:,} tokens read, what is said at {len(kept):,} places kept: {output}, "
        f"{size / 1e6:.1f} MB; draft from it with --laws {output}"
    )
    if as_json:
        print(to_json({"output": str(output), "tokens": read, "places": len(kept), "bytes": size}))


def _tell(talk: Talk, path: Path, done: int, count: int) -> None:
    talk.progress(f"reading {path}, {done:,} of {count:,} tokens")
