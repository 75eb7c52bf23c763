# ruff: noqa: E501  (prose is easier to read and to replace on its own lines)
"""Write the prompts file of the shipped models: knows three kinds of text; knows no model.

24 prompts each of `code` (windows of the held-out sources, cut at a line end), `repetitive`
(tables, logs, lists: text that invites copying) and `unlike` (prose, letters, other languages:
text unlike the training data). The latter two were written for this file.
"""

import argparse
import json
import random
import sysconfig
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from layerskip.files.writing import write_text

MAX_TOKENS = 150
# Tables of code points and generated files are repetitive rather than code to continue.
NOT_CODE = ("encodings/", "test/test_importlib/namespace_pkgs")

UNLIKE = [
    "The harbour was quiet before dawn, and the nets lay folded on the stones where the old man "
    "had left them. He counted the boats that had not come back, and then he counted them again.",
    "Dear Margaret,\n\nThank you for the jam and for the long letter. The children have been down "
    "with colds all week, so I am writing this at the kitchen table while they finally sleep. You "
    "asked about the garden.",
    "Lentil soup for four\n\nWash a cup of red lentils until the water runs clear. Soften an onion "
    "in olive oil with cumin and a little salt, add the lentils and a litre of stock, and let it "
    "simmer. Meanwhile",
    '"You said you would be here at six," she said.\n"I said about six."\n"It is half past eight."\n'
    '"Then we agree that it is about six," he said, and took off his wet coat.',
    "Der Zug hielt auf freier Strecke, und niemand wusste, warum. Draußen lag der Schnee auf den "
    "Feldern, und im Abteil begann ein Kind leise zu singen.",
    "Le marché du samedi commence avant le lever du soleil. Les paysans arrivent avec leurs "
    "camions, installent les tables et parlent de la pluie qui ne vient pas.",
    "Minutes of the allotment society, spring meeting. Present: eleven members and one dog. The "
    "treasurer reported that the water bill had doubled and that nobody had found the leak. It was "
    "agreed that",
    "The river takes its name from the clay of its banks, which turns the water red after rain. For "
    "most of the year it is shallow enough to cross on foot, and the village children do so daily.",
    "My grandmother kept three clocks in the hall and none of them agreed. When we asked her the "
    "time she would look at all three, think for a moment, and tell us what she wanted it to be.",
    "La casa al final de la calle llevaba años vacía, pero cada primavera alguien pintaba la puerta "
    "de azul. Mi hermana decía que era el viento. Yo nunca la creí.",
    "To the editor: I read with surprise your report on the new bridge. I have crossed the river by "
    "ferry for forty years, and in all that time the ferry has been late exactly twice, both times "
    "because of",
    "Bread, day two. The dough had risen over the edge of the bowl during the night and reached the "
    "radio. Knock it back, shape it into two loaves, and leave them under a cloth while the oven "
    "heats.",
    "Scene: a waiting room. Two chairs, one plant, no window.\n\nANNA. Have you been here long?\n"
    "BORIS. Since the plant was small.\nANNA. And has anyone been called?",
    "The comet was first seen by a shepherd, who took it for a fire on the next hill. By the third "
    "night the whole valley was awake, and by the fourth the priest had stopped pretending not to "
    "look.",
    "Het regende al drie dagen toen de brief kwam. Mijn vader las hem staand, vouwde hem op en "
    "legde hem zonder een woord achter de klok.",
    "If you visit in autumn, take the upper path. It is steeper than the road, but it passes the "
    "chapel, and from the wall behind it you can see both lakes and, on a clear evening, the lights "
    "of the city.",
    "Once there was a miller who had three daughters and only one pair of good shoes in the house. "
    "Whoever rose first wore the shoes to market, and so all three learned to rise very early.",
    "The patient is a violin of about 1890, cracked along the lower bout and badly repaired at "
    "least once. The glue is the wrong kind and the varnish is worse, but the sound, to everyone's "
    "surprise, is",
    "Nel cortile c'era un fico che nessuno aveva piantato. D'estate dava ombra a tutti e frutti a "
    "chi si alzava presto, e per questo mio zio non dormiva mai.",
    "Good evening, and welcome to the second half. The home side, in green, have spent most of the "
    "match defending their own goal, and their goalkeeper is easily the most tired man in the "
    "stadium tonight.",
    "She taught me to listen to the engine before touching it. A tractor will tell you what is "
    "wrong, she said, but it will only tell you once, and it will tell you in the cold.",
    "I have slept in worse hotels, but never in one that was proud of it. The brochure spoke of "
    "character. There was a great deal of character in the pipes, and it woke me every hour.",
    "Winter came early that year,\nand stayed to see the spring;\nthe crows held council on the "
    "roof,\nthe well forgot to sing.",
    "Os barcos voltaram ao meio-dia com pouco peixe e muitas histórias. No café, os homens riam "
    "alto, e o mais novo contava pela terceira vez como tinha visto a baleia.",
]


def repetitive_prompts() -> list[str]:
    """24 texts that invite copying, each of a handful of lines with one pattern."""
    fruits = ["apple", "pear", "plum", "fig", "grape", "lemon"]
    days = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
    files = ["alpha", "beta", "gamma", "delta", "epsilon"]

    def lines(*rows: str) -> str:
        return "\n".join(rows) + "\n"

    return [
        lines(
            "| name | count |",
            "|------|-------|",
            *(f"| {f} | {i} |" for i, f in enumerate(fruits)),
        ),
        lines(*(f"2024-03-0{i} 12:00:0{i} INFO worker-1 job {i} finished" for i in range(1, 5))),
        lines(
            *(f"{i}. Check the door of room {i} and write the result down." for i in range(1, 6))
        ),
        lines(*(f"def get_{f}(self):\n    return self._{f}\n" for f in files[:3])),
        lines(*(f"self.assertEqual(add({i}, {i}), {2 * i})" for i in range(1, 6))),
        lines("name,price,stock", *(f"{f},{i}.50,{10 * i}" for i, f in enumerate(fruits, 1))),
        lines(*(f"{d}: open from 9:00 to 17:00" for d in days[:4])),
        lines(*(f"copying {f}.txt to backup/{f}.txt ... ok" for f in files[:4])),
        lines("<ul>", *(f"  <li>{f}</li>" for f in fruits[:5])),
        lines(*(f"{i} x 7 = {7 * i}" for i in range(1, 9))),
        lines(*(f"import {f}\nfrom {f} import {f}_main" for f in files[:4])),
        lines("{", *(f'  "{f}": {{"id": {i}, "active": true}},' for i, f in enumerate(fruits[:4]))),
        lines(*(f"test_{f} (test.test_fruit.FruitTest) ... ok" for f in fruits[:5])),
        lines(*(f"#define FLAG_{f.upper()} 0x{1 << i:02x}" for i, f in enumerate(files))),
        lines(*(f"row {i}: " + "0 " * 8 for i in range(4))),
        lines(*("GET /index.html HTTP/1.1 200 OK",) * 5),
        lines(*(f"if x == {i}:\n    print('x is {i}')" for i in range(4))),
        lines(*("-" * 40, "| " + " " * 36 + " |") * 3),
        lines(*(f"[{f}]\nhost = localhost\nport = {8000 + i}\n" for i, f in enumerate(files[:3]))),
        lines(*("one two three four five six seven eight nine ten",) * 4),
        lines(*(f"WARNING: disk {i} is {90 + i}% full" for i in range(1, 6))),
        lines(*(f"    {f.upper()} = '{f}'" for f in fruits)),
        lines(*(f"chapter {i} ............ page {12 * i}" for i in range(1, 7))),
        lines(*("the cat sat on the mat and the dog sat on the log,",) * 4),
    ]


def code_prompts(tokenizer: PreTrainedTokenizerBase, names: list[str], root: Path) -> list[str]:
    """24 windows of 60 to 120 tokens of the held-out files, the larger files giving more."""
    chosen: list[str] = []
    drawn = random.Random(0)
    names = [name for name in names if not name.startswith(NOT_CODE)]
    while len(chosen) < 24:
        name = names[len(chosen) % len(names)]
        rows = (root / name).read_text(encoding="utf-8").splitlines(keepends=True)
        first = drawn.randrange(max(1, len(rows) - 12))
        goal = drawn.randint(60, 110)
        text = ""
        for row in rows[first:]:
            text += row
            if len(tokenizer(text)["input_ids"]) >= goal:
                break
        if 60 <= len(tokenizer(text)["input_ids"]) <= 120:
            chosen.append(text)
        else:  # another draw; a file that has no such window is dropped
            names = names if len(rows) > 40 else [n for n in names if n != name]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("runs/train"))
    parser.add_argument("--output", type=Path, default=Path("layerskip/models/prompts.jsonl"))
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.work / "tokenizer")
    held_out = json.loads((args.work / "heldout.json").read_text())
    kinds = {
        "code": code_prompts(tokenizer, held_out, Path(sysconfig.get_paths()["stdlib"])),
        "repetitive": repetitive_prompts(),
        "unlike": UNLIKE,
    }
    rows = []
    for category, prompts in kinds.items():
        if len(set(prompts)) != 24:
            raise ValueError(f"{category} must have 24 different prompts, got {len(set(prompts))}")
        for prompt in prompts:
            length = len(tokenizer(prompt)["input_ids"])
            if length > MAX_TOKENS:
                raise ValueError(f"a prompt has {length} tokens, allowed {MAX_TOKENS}: {prompt!r}")
            rows.append(json.dumps({"prompt": prompt, "category": category}, ensure_ascii=False))
    write_text(args.output, "\n".join(rows) + "\n")
    print(f"wrote {len(rows)} prompts to {args.output}")


if __name__ == "__main__":
    main()
