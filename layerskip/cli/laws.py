"""The laws command: stores in a file which tokens a model finds likely throughout some texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from layerskip.cli.flags import AsJson, Loading, Quiet, flag, text_in
from layerskip.cli.inputs import check_file
from layerskip.cli.opening import open_model, open_passes
from layerskip.cli.terminal import Talk, to_json
from layerskip.registry import named
from layerskip.text import plural


def laws(
    *,
    text: list[Path] = flag(
        "Read this UTF-8 text; repeatable. For repeated contexts, the last text counts.",
        "FILE",
        default=...,
    ),
    output: Path = flag("Write this file; an existing one is replaced.", "FILE", default=...),
    places: int | None = flag(
        "Keep at most N contexts of 272 bytes each.  [default: 16384]", "N", min=1
    ),
    loading: Loading,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Store which tokens a model finds likely in your texts.

    The file lists the likely next tokens after each sequence of four tokens. With `--laws FILE`,
    `generate`, `chat`, `run`, `serve` and `benchmark` draft from it. It works for this model only.

    Example: layerskip laws demo-llama --text notes.txt --output notes.laws
    """
    texts = [text_in("--text", each) for each in text]
    talk = Talk(quiet)
    check_file(output, talk)
    loaded = open_model(loading, talk)
    with open_passes(loaded, loading, talk) as opened:
        kept, read = named("store", "laws")(places), 0
        for path, content in zip(text, texts, strict=True):
            tokens = loaded.tokenizer(content, add_special_tokens=False)["input_ids"]
            kept.learn(opened, tokens, partial(_tell, talk, path))
            read += len(tokens)
    talk.progress("")
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    kept.save(output)
    size = output.stat().st_size
    talk.say(
        f"{plural(read, 'token')} read, likely tokens of {plural(len(kept), 'context')} kept: "
        f"{output}, "
        f"{size / 1e6:.1f} MB; draft from it with --laws {output}"
    )
    if as_json:
        print(to_json({"output": str(output), "tokens": read, "places": len(kept), "bytes": size}))


def _tell(talk: Talk, path: Path, done: int, count: int) -> None:
    talk.progress(f"reading {path}, {done:,} of {count:,} tokens")
