"""Measure what earlier answers are worth: a day of an agent's requests, without them and with them.

    python scripts/agent_day.py smollm2                  # the model's own answers
    python scripts/agent_day.py smollm2 --given          # the answers that the file has

A line per category has tokens a pass and tokens a second, prompts included.
"""

import argparse
import json
import time
from collections import Counter

import torch

import layerskip
from layerskip.config.shipped import AGENT_DAY
from layerskip.texts.prompts import read_prompts


class Given:
    """Allows nothing but an answer after a prompt of `width` tokens."""

    layerskip_pure = True

    def __init__(self, answer: list[int], width: int) -> None:
        self.answer, self.width = answer, width

    def __call__(self, history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores (B, V) that follow the tokens so far (B, n)."""
        token = self.answer[min(history.shape[1] - self.width, len(self.answer) - 1)]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token]), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--given", action="store_true", help="write the answers in the file")
    asked = parser.parse_args()
    loaded = layerskip.load(asked.model, dtype="float32")
    # Drafts by the model itself would have to be the given answer, too.
    how = {"draft_memory": 0} if asked.given else {}
    sessions = {
        name: layerskip.Session(loaded.model, remember=where, **how)
        for name, where in (("without", "off"), ("with", "memory"))
    }
    counts, lines = Counter(), AGENT_DAY.read_text(encoding="utf-8").splitlines()
    for number, (prompt, line) in enumerate(zip(read_prompts(AGENT_DAY), lines, strict=True)):
        inputs = loaded.inputs(prompt)
        more, texts = {"max_new_tokens": 96}, []
        if asked.given:
            answer = loaded.tokenizer(json.loads(line)["reference"])["input_ids"]
            answer.append(loaded.tokenizer.eos_token_id)
            more = {"logits_processor": [Given(answer, inputs["input_ids"].shape[1])]}
            more["max_new_tokens"] = len(answer)
        for name in sorted(sessions, reverse=number % 2 > 0):
            began = time.perf_counter()
            out = sessions[name].generate(inputs, do_sample=False, **more)
            for category in (prompt.category, "all"):
                counts[name, category, "seconds"] += time.perf_counter() - began
                counts[name, category, "tokens"] += out.stats.num_new_tokens - 1
                counts[name, category, "passes"] += out.stats.num_rounds
            texts.append(out.sequences.tolist())
        assert texts[0] == texts[1], "a text depends on its drafts"
    for category in dict.fromkeys(category for _, category, _ in counts):
        words = f"{category:14}"
        for name in sessions:
            tokens, passes, seconds = (
                counts[name, category, each] for each in ("tokens", "passes", "seconds")
            )
            words += f"  {name}: {tokens / passes:5.2f} a pass, {tokens / seconds:6.1f} a second"
        print(words)


if __name__ == "__main__":
    main()
