"""Make the data and the tokenizer of the shipped models, from Python's own sources.

Reads every .py file of the standard library, holds 2.5% of them out by a hash of their path, trains
a byte-level BPE tokenizer of 2048 entries on the rest and writes, under --work:

    tokenizer/       PreTrainedTokenizerFast files (end of text 0, pad 1, no beginning of text)
    train.npy        uint16 token ids, documents separated by the end-of-text token
    heldout.npy      the same for the files held out
    data.json        counts, and the version of Python that was read
"""

import argparse
import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, PAD = "<|endoftext|>", "<|pad|>"
HELD_OUT_PER_MILLE = 25


def is_held_out(relative_path: str) -> bool:
    """Decided by a file's path alone, so that it stays so everywhere."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def read_sources(root: Path) -> dict[str, str]:
    """Relative path -> text of each source file under `root` that is UTF-8 and not installed."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name or "__pycache__" in name:
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few test files are in other encodings on purpose
            continue
        if text.strip():
            sources[name] = text.replace("\r\n", "\n")
    return sources


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `vocab_size` entries, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> np.ndarray:
    """Token ids (N,) uint16 of the texts, each one followed by the end-of-text token."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return np.array(ids, dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    sources = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    held_out = [name for name in sources if is_held_out(name)]
    train = [name for name in sources if not is_held_out(name)]
    tokenizer = train_tokenizer([sources[name] for name in train], args.vocab_size)
    tokenizer.save_pretrained(args.work / "tokenizer")
    counts = {}
    for split, names in (("train", train), ("heldout", held_out)):
        texts = [sources[name] for name in names]
        ids = encode(tokenizer, texts)
        np.save(args.work / f"{split}.npy", ids)
        counts[split] = {
            "files": len(names),
            "bytes": sum(len(text.encode()) for text in texts),
            "tokens": len(ids),
        }
    facts = {"python": platform.python_version(), "splits": counts}
    (args.work / "data.json").write_text(json.dumps(facts, indent=1))
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
