"""Type what README tells a new user to type, with this Python's environment and a shipped model.

    python scripts/way_in.py example    # the program, `generate`, and `chat` through a pipe
    python scripts/way_in.py serve      # the server, with one request

Neither the Hub nor this checkout is used: the current folder gets a copy of the model, which has a
chat template there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

README = Path(__file__).parents[1] / "README.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
QUESTION = "Who wrote Faust?"


def program(page: Path, words: str) -> str:
    """The Python program on a page that contains the words."""
    text = page.read_text(encoding="utf-8")
    programs: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return next(code for code in programs if words in code)


def command(name: str) -> list[str]:
    """README's first line that runs a command of layerskip, with the copied model."""
    line = re.search(rf"^layerskip {name} .*", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert line is not None, name
    _, *words = shlex.split(line[0], comments=True)
    there = Path(sys.executable).with_name("layerskip")
    return [str(there), *("model" if word == "MODEL" else word for word in words)]


def example() -> None:
    code = program(README, MODEL).replace(MODEL, "model")
    asked = {"": [sys.executable, "-c", code]}
    asked |= {name: command(name) for name in ("generate", "chat")}
    for name, words in asked.items():
        print("$", *words[: 4 if name else 1], flush=True)
        run = subprocess.run(words, input=f"{QUESTION}\n", stdout=subprocess.PIPE, text=True)
        print(run.stdout)
        if run.returncode or not run.stdout.strip():
            sys.exit(f"README's {name or 'program'} failed here, with code {run.returncode}")


def serve() -> None:
    words = [*command("serve"), "--port", "0"]
    asked = {"model": "model", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            found = (re.search(r"http://\S+/v1", line) for line in server.stderr)
            address = next((each[0] for each in found if each), None)
            if address is None:
                sys.exit(f"README's server ended with code {server.wait()}")
            request = Request(f"{address}/chat/completions", json.dumps(asked).encode())
            request.add_header("Content-Type", "application/json")
            with urlopen(request, timeout=60) as answer:
                [choice] = json.load(answer)["choices"]
        finally:
            server.terminate()
    print("$", *words, "\n" + choice["message"]["content"])


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not Path("model").exists():
        import layerskip

        shutil.copytree(layerskip.shipped("demo-llama"), "model")
        Path("model", "chat_template.jinja").write_text(TEMPLATE)
    {"example": example, "serve": serve}[sys.argv[1]]()
