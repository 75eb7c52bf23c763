"""Write the sources of Python's standard library as texts for `layerskip train --texts`.

    python scripts/build_data.py texts.jsonl

The files that the shipped models were not trained on (2.5%, chosen by a hash of their paths) are
placed where training holds texts out. The shipped models' tokenizer was trained on the others.
"""

import argparse
import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from layerskip.files.writing import replacing
from layerskip.training.token_files import EVERY

HELD_OUT_PER_MILLE = 25


def is_held_out(relative_path: str) -> bool:
    """Depends only on a file's path, so that it is the same everywhere."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def read_sources(root: Path) -> dict[str, str]:
    """Relative path -> text of each UTF-8 source file under `root` that is not installed."""
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


def in_order(names: list[str]) -> Iterator[str]:
    """The names shuffled, with a held-out one at every EVERY-th place as long as there are any."""
    random.Random(0).shuffle(names)
    held_out = [name for name in names if is_held_out(name)]
    train = [name for name in names if not is_held_out(name)]
    for number in range(len(names)):
        yield (held_out if held_out and (number % EVERY == 0 or not train) else train).pop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    sources = read_sources(Path(sysconfig.get_paths()["stdlib"]))
    with replacing(args.output) as partial, partial.open("w", encoding="utf-8") as file:
        for name in in_order([*sources]):
            file.write(json.dumps({"id": name, "text": sources[name]}) + "\n")
    print(f"{len(sources):,} files, {sum(map(len, sources.values())) / 1e6:.1f}M characters")


if __name__ == "__main__":
    main()
