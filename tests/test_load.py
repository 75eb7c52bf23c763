"""scripts/load.py: what it sends, counts and reports, without a socket."""

import asyncio
import json

import httpx
import load
import pytest
import torch
from checkpoints import tiny_tokenizer
from models import lively_model

from layerskip.api.loading import Loaded
from layerskip.serving.http import make_app
from layerskip.serving.openai_api import Served
from layerskip.serving.scheduler import Serving

URL = "http://127.0.0.1:8000/v1"


class Server:
    """Answers every chat in pieces, and records the requests and the most of them at once."""

    def __init__(self, pieces=3, *, usage=None, end="stop"):
        self.pieces, self.usage, self.end = pieces, usage, end
        self.asked = []
        self.going = self.most = 0

    async def __call__(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}, {"id": "other"}]})
        assert request.url.path == "/v1/chat/completions"
        self.asked.append(json.loads(request.content))
        return httpx.Response(200, content=self.stream())

    async def stream(self):
        self.going += 1
        self.most = max(self.most, self.going)
        yield event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        for _ in range(self.pieces):
            await asyncio.sleep(0.001)
            yield event({"delta": {"content": "a "}, "finish_reason": None})
        yield b": a comment\n\n" + event({"delta": {}, "finish_reason": self.end})
        if self.usage is not None:
            usage = {"completion_tokens": self.usage}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()
        self.going -= 1
        yield b"data: [DONE]\n\n"


def event(choice):
    return f"data: {json.dumps({'choices': [choice]})}\n\n".encode()


def levels(transport, *words):
    async def run():
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            return [level async for level in load.run_levels(load.parsed([URL, *words]), client)]

    return asyncio.run(run())


def test_so_many_at_once_with_seeds_and_numbers():
    server = Server(usage=5)
    words = ["--clients", "1", "3", "--requests", "4", "--seed", "10", "--warmup", "2"]
    one, three = levels(httpx.MockTransport(server), *words)
    assert (one["requests"], three["requests"]) == (4, 6)  # at least two per client
    assert server.most == 3
    assert sorted(each["seed"] for each in server.asked) == list(range(10, 22))  # two are warm-ups
    contents = [each["messages"][0]["content"] for each in server.asked]
    numbers, prompts = zip(*(said[1:].split(") ", 1) for said in contents), strict=True)
    assert [int(number) for number in numbers] == [each["seed"] for each in server.asked]
    assert len(set(prompts)) == 6  # the same prompts at each level
    assert {each["model"] for each in server.asked} == {"tiny"}
    assert (one["tokens"], one["counted"]) == (20, "usage")
    assert one["tokens_per_second"] == pytest.approx(20 / one["seconds"])
    assert 0 < one["between"] <= one["between_p90"] < one["seconds"]


def test_pieces_are_counted_where_there_is_no_usage():
    server = Server(pieces=4)
    words = ["--clients", "2", "--requests", "4", "--warmup", "0", "--no-usage"]
    [level] = levels(httpx.MockTransport(server), *words)
    assert (level["tokens"], level["counted"]) == (16, "pieces")
    assert "stream_options" not in server.asked[0]
    assert load.ROW.format(**level).split()[:3] == ["2", "4", "16"]


def test_the_ninetieth_percentile():
    counts, high = (1, 9, 10, 11, 20, 100), [0, 8, 8, 9, 17, 89]
    assert [load.typical("x", range(count))["x_p90"] for count in counts] == high


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (Server(end=None), "no end"),
        (Server(pieces=0), "no text"),
        (lambda request: httpx.Response(429, text="later"), "answers 429: later"),
        (lambda request: httpx.Response(200, text='data: {"error": "lost"}\n'), "breaks off: lost"),
    ],
)
def test_what_is_no_answer_is_refused(server, message):
    with pytest.raises(ExceptionGroup) as raised:
        levels(httpx.MockTransport(server), "--model", "tiny", "--warmup", "1")
    [error] = raised.value.exceptions
    assert message in str(error)


def test_nobody_there_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        load.main(["http://127.0.0.1:9/v1"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("load: error: All connection attempts failed")


def test_our_own_server():
    model = lively_model("llama", dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    served = Served(Loaded("tiny", model, tokenizer, None))
    serving = Serving(model, execution="fused", enabled=False, session_memory=0)
    serving.start()
    try:
        transport = httpx.ASGITransport(make_app(serving, served))
        words = ["--clients", "1", "3", "--requests", "3", "--max-tokens", "6"]
        one, three = levels(transport, *words)
    finally:
        serving.stop()
    assert (one["tokens"], three["tokens"]) == (18, 36)  # every text is as long as allowed
    assert {one["counted"], three["counted"]} == {"usage"}
