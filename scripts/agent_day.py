"""Measure what earlier answers are worth: a day of an agent's requests, with and without them.

    python scripts/agent_day.py smollm2                  # the model's own answers
    python scripts/agent_day.py smollm2 --given          # answers that the file has
    python scripts/agent_day.py smollm2 --unlike 2000    # in an index that is full of other texts

Both sessions get every request in turn. A line per category gives the tokens a pass and the tokens
a second, prompts included, without earlier answers and with them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import layerskip
from layerskip.config.shipped import NAMED_PROMPTS
from layerskip.decoding.sources.earlier import EarlierAnswers
from layerskip.texts.prompts import read_prompts

WORDS = [*range(1000, 9000)]  # of which unlike texts are made, some much more often than others
RARITY = [1 / rank for rank in range(1, len(WORDS) + 1)]


class Given:
    """Leaves only the tokens of a given answer."""

    layerskip_pure = True

    def __init__(self, answer: list[int], width: int) -> None:
        self.answer, self.width = answer, width

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """Scores (B, V) that follow the tokens so far (B, n)."""
        at = min(history.shape[1] - self.width, len(self.answer) - 1)
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self.answer[at]] = 0
        return allowed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prompts", default="agent-day", help="a file, or the name of a set")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="only so many requests")
    parser.add_argument("--given", action="store_true", help="force the answers in the file")
    parser.add_argument("--unlike", type=int, default=0, help="index so many other texts before")
    asked = parser.parse_args()
    loaded, earlier, drawn = (
        layerskip.load(asked.model, dtype=asked.dtype),
        EarlierAnswers(),
        random.Random(0),
    )
    model, tokenizer = loaded.model, loaded.tokenizer
    for _ in range(asked.unlike):
        earlier.of().add(drawn.choices(WORDS, RARITY, k=45))
    # A given answer is written without the model's own drafts, which would be forced, too.
    how: dict[str, Any] = {"draft_memory": 0} if asked.given else {}
    sessions = {
        "without": layerskip.Session(model, remember="off", **how),
        "with": layerskip.Session(model, remember=earlier, **how),
    }
    tokens, passes, seconds = (Counter[tuple[str, str]]() for _ in range(3))
    file = NAMED_PROMPTS.get(asked.prompts, Path(asked.prompts))
    prompts, lines = read_prompts(file)[: asked.limit], file.read_text(encoding="utf-8")
    given = [json.loads(line).get("reference") for line in lines.splitlines()]
    for number, prompt in enumerate(prompts):
        inputs, more = loaded.inputs(prompt), dict[str, Any]()
        if asked.given:
            answer = tokenizer(given[number], add_special_tokens=False)["input_ids"]
            answer.append(tokenizer.eos_token_id)
            more = {"logits_processor": [Given(answer, inputs["input_ids"].shape[1])]}
        most = len(answer) if asked.given else asked.max_new_tokens
        texts = []
        for name in sorted(sessions, reverse=bool(number % 2)):
            began = time.perf_counter()
            out = sessions[name].generate(inputs, max_new_tokens=most, do_sample=False, **more)
            for key in ((name, prompt.category or ""), (name, "all")):
                seconds[key] += time.perf_counter() - began
                tokens[key] += out.stats.num_new_tokens - 1
                passes[key] += out.stats.num_rounds
            texts.append(out.sequences.tolist())
        assert texts[0] == texts[1], "a text depends on its drafts"
    for category in dict.fromkeys(category for _, category in tokens):
        line = f"{category:14}"
        for name in sessions:
            key = name, category
            line += f"  {name}: {tokens[key] / passes[key]:5.2f} a pass"
            line += f" {tokens[key] / seconds[key]:6.1f} a second"
        print(line)
    print(f"{len(earlier.of()):,} tokens remembered")


if __name__ == "__main__":
    main()
