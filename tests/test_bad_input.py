"""Commands that are refused: one line on stderr, exit code 2, and nothing written."""

import re
import sys

import pytest
from commands import PROMPT, refused

FILES = {  # files in the folder that the commands run in
    "diary": "my diary",
    "empty": "",
    "bytes": b"\xff\xfe\x00",
    "some": "w3 w9",
    "form.jsonl": '{"prompt": "w5", "response_format": {"type": "json_object"}}',
    "key.jsonl": '{"prompt": "w5", "temperature": 3}',
    "two.txt": f"{PROMPT}\nw9 w8 w7\n",
    "chat.jsonl": '{"messages": [{"role": "user", "content": "w5"}]}',
    "torn.jsonl": '{"prompt": ',
    "torn.json": '{"attention": [1], "mlp": [2',
    "six.json": '{"attention": [6]}',
    "named.json": '{"small": {"attention": [2]}, "large": {"attention": [3]}}',
    "magic.json": '{"exit_layer": 2, "decoding": {"controller": "magic"}}',
    "empty.txt": "",
    "short.txt": "too short\n",
    "bad.jsonl": '{"prompt": "x"}\n',
    "long.txt": "import os  # and so on\n" * 1000,
    "one.txt": "w5 w6\n",
    "five.txt": "w5 w6\n" * 5,
    "six.txt": "w7 " * 240 + "\n" + "w5\n" * 5,
    "nine.txt": "w5 w6 w7\n" * 9,
}
REFUSED = {  # by command
    f"generate MODEL --prompt {PROMPT[:2]} ": [
        ("--exit-layer 6", "exit_layer must be in 1..5 for a 6-layer model, got 6"),
        (f"--exit-layer {'9' * 400}", "got 999999999999999999...9999999999999999999"),
        ("--skip nowhere.json", "cannot read skip config nowhere.json"),
        ("--exit-layer 3 --skip x.json", "give --skip or --exit-layer, not both"),
        ("--skip torn.json", "not valid JSON"),
        ("--skip six.json", "attention indices must be in 0..5 for a 6-layer model, got 6"),
        ("--skip magic.json", "controller must be one of fixed, confidence"),
        ("--skip named.json", "choose with --entry .*: 'small', 'large'"),
        ("--skip named.json --entry big", "no entry 'big'; the file has 'small', 'large'"),
        ("--max-new-tokens 0", "'--max-new-tokens' / '-n': "),
        ("--max-new-tokens 1000", "at most 256 tokens for this model, got 1001"),
        ("--controller magic", "'magic' is not one of 'fixed', 'confidence', "),
        ("--threshold 1.5 --controller confidence", "'--threshold': .*to 1, got '1.5'"),
        ("--skip six.json --skip six.json", "--skip names a file twice"),
        ("--adaptive alpha", "--adaptive must be like alpha=0.85,epsilon=0.02; got 'alpha'"),
        ("--adaptive gamma=1", "adaptive may have alpha, epsilon, beta1, beta2; got 'gamma'"),
        ("--do-sample --seed -1", "'--seed': "),
        (
            "--source running-ahead --assistant MODEL --do-sample --acceptance rejection",
            "on timing",
        ),
        ("--temperature -1", "--temperature must be 0 or more, got -1.0"),
        ("--repetition-penalty 0", "--repetition-penalty must be positive and finite"),
        ("--repetition-penalty nan", "--repetition-penalty must be finite, got nan"),
        ("--draft-memory inf", "--draft-memory must be finite, got inf"),
        ("--stop=", "--stop is empty"),
        ("--device cuda:77", "device must be auto or one that this torch can use (cpu"),
        ("--prompt-file p.txt", "--prompt TEXT or --prompts FILE; got both"),
        ("--lookup-file some --no-lookup", "give --lookup-file or --no-lookup, not both"),
        ("--lookup-file empty", "is empty"),
        ("--lookup-file bytes", ": not UTF-8: "),
        ("--lookup-file none", "No such file"),
        ("--low-precision 8 --draft-memory 0.00001", "8 needs .*, but --draft-memory allows 0 MB"),
        ("--colour", "No such option"),
    ],
    "generate MODEL ": [
        ("", "got none of them"),
        ("--prompt=", "--prompt is empty"),
        ("--prompt-file no", "cannot read prompts"),
        ("--prompt-file chat.jsonl", "no chat template"),
        ("--prompt-file empty", "are empty"),
        ("--prompt-file key.jsonl", "line 1: a line may have the keys prompt,.*got 'temperature'"),
        ("--prompt-file form.jsonl", "prompt 1 has its own response_format; use layerskip run"),
    ],
    "generate demo-lama ": [("--prompt x", "is no model demo-lama; did you mean demo-llama?")],
    "run MODEL key.jsonl ": [("--output new/out", "got 'temperature'")],
    "check ": [
        ("MODEL --exit-layer 2 --prompts torn.jsonl", "torn.jsonl, line 1"),
        ("missing.gguf", "there is no file missing.gguf"),
        ("MODEL --low-precision none --no-lookup", "give a skip config"),
        ("MODEL --exit-layer 1 --exit-layer 2", "check takes one --skip or --exit-layer; run it"),
        ("./missing", "there is no folder"),
    ],
    "demo ": [
        ("MODEL --low-precision none --no-lookup", "give a skip config"),
        ("./missing", "there is no folder"),
    ],
    "benchmark MODEL --prompts two.txt --output run.jsonl ": [
        ("--method magic", "--method must be one of plain, self, generate, self-lookup"),
        ("--controller magic", "--controller must be one of fixed, confidence"),
        ("--method generate-assistant", "needs a second model; give --assistant MODEL"),
        ("--method self-together --exit-layer 3", "give --skip or --exit-layer more than once"),
        ("--batch-size 3 --exit-layer 3", "no 3 prompts share a category"),
        ("--repeats 0", "'--repeats': "),
        ("--context 9 --explain", "replay prompts as they are; leave out --context"),
        ("--explain --sweep x", "--explain is a --sweep of every exit; give only one of them"),
    ],
    "benchmark MODEL ": [
        ("--prompts two.txt --output diary --exit-layer 3", "not a file of records"),
        ("--output other.jsonl", "this model comes without prompts; give --prompts FILE"),
        ("--prompts two.txt --output .", "--output . is a folder, a pipe or a device"),
        ("", "Missing option"),
    ],
    "report ": [
        ("none.jsonl --output report", "cannot read records"),
        ("diary --output report", "not a file of records"),
    ],
    "answer ": [("", "No such (command|option)")],
    "benchmark MODEL --prompts two.txt --output run.jsonl --sweep ": [
        (grid, "--sweep must be like exits=2..12,lengths=1..8, with exits in 1..5 for this")
        for grid in ("exits=2..6,lengths=1..2", "exits=0..2,lengths=1..2", "2..4")
    ],
    "search MODEL --output out --bits none --max-new-tokens 24 ": [
        ("--prompts nine.txt --timeout nan", "--timeout must be finite, got nan"),
        ("--prompts nine.txt -n 1000", "must be at most 256 tokens for this model, got 1003"),
        ("--prompts five.txt", "a search needs at least 6 prompts, a third of them to time the"),
        ("--prompts six.txt", "must be at most 256 tokens for this model, got 264"),
        ("--prompts one.txt --no-confirm", "a search needs at least 2 prompts, got 1; give more"),
    ],
    "train demo-llama --output out --draft heads ": [
        ("--prompts empty.txt", "prompts empty.txt are empty"),
        ("--output empty.txt", "--output empty.txt is a file; give a folder"),
        ("--output empty.txt/x", "--output empty.txt/x cannot be made: "),
        ("--tokens 0", "should be greater than or equal to 1"),
        ("--minutes -1", "--minutes must be more than 0 minutes and finite, got -1"),
        ("--rate -1", "rate must be 0 or more, got -1"),
        ("--draft assistant", "--draft assistant needs --start NAME"),
        ("--start x", "--start needs --draft assistant or eagle3; leave it out"),
        ("--exit-layer 2", "--exit-layer needs --draft exit-block; leave it out"),
        ("--exit-layer 30 --draft exit-block", "exit_layer must be in 1..23"),
    ],
    "train demo-llama --output out ": [
        ("--recipe draft", "--recipe draft needs --draft KIND, one of exit-block, "),
    ],
    "train demo-gemma2 --steps 1 --output out --recipe exits --texts long.txt ": [
        ("--exits 4,x", "--exits must be all, or layers with commas, such as 4,8; got '4,x'"),
        ("--exits 4,16", "exits must be in 1..15 for this model, got [4, 16]"),
        ("--dropout 1", "dropout must be 0 or more and less than 1, got 1"),
        ("--keep -1", "keep must be 0 or more, got -1"),
        ("--tokens 4", "--tokens needs --draft KIND; leave it out"),
        ("--config c.json", "--config needs --init random; leave it out"),
        ("--init random --loss kl", "random weights are trained towards the text: loss ce"),
        ("--init random --config short.txt", "--config short.txt is not a configuration: "),
        ("--init random --prompts long.txt", "random weights cannot answer prompts; give --texts"),
        ("--draft heads", "--draft needs --recipe draft; leave it out"),
        ("--execution fused", "--execution needs --draft KIND; leave it out"),
        ("--recipe draft --draft heads --lora 4", "--lora needs --recipe exits; leave it out"),
        ("--texts none.txt", "cannot read texts none.txt: No such file or directory"),
        ("--texts bad.jsonl", 'texts bad.jsonl: line 1: a line must be an object with "text"'),
        ("--texts short.txt", "tokens, too few for 4 windows of 256 to train on and one to judge"),
        ("--lora 4", "--lora needs peft, which is not installed: pip install peft"),
    ],
}


@pytest.mark.parametrize(
    ("line", "words"),
    [(start + rest, words) for start, cases in REFUSED.items() for rest, words in cases],
)
def test_bad_input_is_refused_in_one_line(checkpoint, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    told = refused(*line.replace("MODEL", str(checkpoint)).split())
    assert words in told or re.search(words, told)
    assert {path.name for path in tmp_path.iterdir()} == FILES.keys()
    assert (tmp_path / "diary").read_text() == "my diary"
