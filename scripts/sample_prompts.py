"""Take a few prompts of each category of a prompt file.

    python scripts/sample_prompts.py question.jsonl --per-category 4 --output sample.jsonl

Those of a category are as far apart in the file as they can be, and of a conversation only the
first turn is taken. The shipped sample of Spec-Bench was made with --per-category 4 and the
categories whose terms let it be passed on (see its README).
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from layerskip.files.writing import write_text
from layerskip.prompts import Prompt, read_prompts


def sample(
    prompts: Sequence[Prompt], count: int, categories: Sequence[str] | None = None
) -> list[Prompt]:
    """So many prompts of each category, or all that there are; categories in order of appearance.

    Raises:
        ValueError: none is of a category asked for.
    """
    own: dict[str | None, list[Prompt]] = {}
    for prompt in prompts:
        own.setdefault(prompt.category, []).append(prompt)
    for name in categories or ():
        if name not in own:
            raise ValueError(f"a category must be one of {', '.join(map(str, own))}, got {name!r}")
    return [
        each[place * len(each) // min(count, len(each))]
        for name, each in own.items()
        if categories is None or name in categories
        for place in range(min(count, len(each)))
    ]


def line(prompt: Prompt) -> str:
    """A prompt as one line of JSON."""
    values = {"id": prompt.id, "category": prompt.category}
    content = {"prompt": prompt.text, "messages": prompt.messages}
    kept = {name: value for name, value in (values | content).items() if value is not None}
    return json.dumps(kept, ensure_ascii=False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help="a prompt file; Spec-Bench's question.jsonl")
    parser.add_argument("--per-category", type=int, default=4)
    parser.add_argument("--category", nargs="+", metavar="NAME", help="all otherwise")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        if args.per_category < 1:
            raise ValueError(f"--per-category must be at least 1, got {args.per_category}")
        chosen = sample(read_prompts(args.prompts), args.per_category, args.category)
        write_text(args.output, "".join(f"{line(prompt)}\n" for prompt in chosen))
    except (ValueError, OSError) as error:
        parser.exit(2, f"sample_prompts: error: {error}\n")
    print(f"wrote {len(chosen)} prompts to {args.output}")


if __name__ == "__main__":
    main()
