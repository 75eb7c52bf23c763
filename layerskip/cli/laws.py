"""The laws command: what a model says behind every few tokens of a person's texts, as a file."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from layerskip.cli.drafting import text_in
from layerskip.cli.options import AsJson, Loading, Quiet, open_model, open_passes, to_json
from layerskip.cli.terminal import Talk


def laws(
    *,
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="A text to read; UTF-8; repeatable, the last one stays."),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The laws; replaced.")],
    places: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="To keep, 272 bytes each.  [default: 16384]"),
    ] = None,
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Read your texts with a model, and keep what it says after every four tokens of them.

    With `--laws FILE`, `generate`, `chat`, `run`, `serve` and `benchmark` draft from it: trees of
    what the model would say after the same tokens. The file is of this model; others refuse it.
    """
    texts = [text_in("--text", each) for each in text]
    talk = Talk(quiet)
    loaded = open_model(loading, talk)
    with open_passes(loaded, loading, talk) as opened:
        from layerskip.decoding.sources.kept_laws import MOST, Laws

        kept, read = Laws(places or MOST), 0
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
