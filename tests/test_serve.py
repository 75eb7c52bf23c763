"""`layerskip serve`: what clients of OpenAI's interface get, over real connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from layerskip.checkpoints import load
from layerskip.cli import main
from layerskip.generation import decode
from layerskip.serving import http
from layerskip.serving.api import Served
from layerskip.serving.history import Penalties, StopStrings
from layerskip.serving.http import make_app
from layerskip.serving.scheduler import Serving
from layerskip.text import Detokenizer, decode_text

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
STORY = "Once upon a time there was a little"
KEY = "a key"


@contextmanager
def running(app: Any) -> Iterator[str]:
    """A real server on a free port, on a thread; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # a slow reader is soon noticed
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class Place:
    """A model that is served, and how to reach it."""

    def __init__(self, url: str, served: Served, model: Any, serving: Serving) -> None:
        self.url, self.served, self.model, self.serving = url, served, model, serving
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=headers, **kwargs)

    def alone(self, prompt: str, new: int, **law: Any) -> list[int]:
        """The tokens that the library decodes for a prompt alone."""
        ids = torch.tensor([self.served.tokenizer(prompt)["input_ids"]])  # (1, T)
        settings: dict[str, Any] = {
            "execution": "fused",
            "max_new_tokens": new,
            "top_k": 0,
            "top_p": 1.0,
        }
        settings["enabled"] = False
        rounds = decode(self.model, ids, **{**settings, **law})
        return [token for round_ in rounds for token in round_.tokens[0]]

    def text(self, prompt: str, new: int, **law: Any) -> str:
        return decode_text(self.served.tokenizer, self.alone(prompt, new, **law))


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    loaded = load("demo-llama", dtype="float32")
    loaded.tokenizer.chat_template = TEMPLATE
    served = Served.of(loaded, max_new_tokens=12)
    drafts: Any = {"controller": "fixed", "lookup": True, "draft_memory": 0}
    serving = Serving(loaded.model, max_tokens=served.context, execution="fused", **drafts)
    with running(make_app(serving, served, api_key=KEY, max_body=20_000)) as url:
        yield Place(url, served, loaded.model, serving)


def waits_until(what: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


GREEDY = {"model": "demo-llama", "temperature": 0, "max_tokens": 24}
LONG = {"model": "demo-llama", "prompt": STORY, "max_tokens": 400, "temperature": 1.0}


class TestAnswers:
    def test_models(self, place: Place) -> None:
        assert [model.id for model in place.client.models.list()] == ["demo-llama"]
        assert place.client.models.retrieve("demo-llama").owned_by == "layerskip"
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            place.client.models.retrieve("other")

    def test_a_completion_is_the_text_of_the_library(self, place: Place) -> None:
        got = place.client.completions.create(prompt=STORY, **GREEDY)
        tokens = place.alone(STORY, 24)
        assert got.choices[0].text == decode_text(place.served.tokenizer, tokens)
        assert got.usage is not None
        assert got.usage.completion_tokens == len(tokens)
        assert got.usage.prompt_tokens == len(place.served.tokenizer(STORY)["input_ids"])
        timings = (got.model_extra or {})["timings"]
        assert 0 <= timings["accepted"] <= timings["drafted"]
        assert timings["seconds"] > 0

    def test_a_chat_goes_through_the_template(self, place: Place) -> None:
        parts: Any = [{"type": "text", "text": "Tell"}, {"type": "text", "text": " me."}]
        got = place.client.chat.completions.create(
            messages=[
                {"role": "developer", "content": "Be kind."},
                {"role": "user", "content": parts},
            ],
            **{**GREEDY, "max_tokens": None, "max_completion_tokens": 20},
        )
        prompt = "system: Be kind.\nuser: Tell me.\nassistant:"
        assert got.choices[0].message.role == "assistant"
        assert got.choices[0].message.content == place.text(prompt, 20)
        assert got.choices[0].finish_reason in ("stop", "length")

    def test_a_prompt_in_tokens_and_a_default_length(self, place: Place) -> None:
        ids = place.served.tokenizer(STORY)["input_ids"]
        got = place.client.completions.create(model="demo-llama", prompt=ids, temperature=0)
        assert got.choices[0].text == place.text(STORY, 12)

    def test_several_prompts_and_choices_each_with_its_seed(self, place: Place) -> None:
        prompts = [STORY, "The dog"]
        got = place.client.completions.create(
            model="demo-llama", prompt=prompts, n=2, seed=5, temperature=0.9, max_tokens=10
        )
        expected = [
            place.text(prompt, 10, do_sample=True, temperature=0.9, seeds=[seed])
            for seed, prompt in zip(range(5, 9), [p for p in prompts for _ in "12"], strict=True)
        ]
        assert [choice.text for choice in got.choices] == expected
        assert got.choices[3].index == 3
        assert got.usage is not None
        both = sum(len(place.served.tokenizer(p)["input_ids"]) for p in prompts)
        assert got.usage.prompt_tokens == both

    def test_a_seed_is_drawn_and_told(self, place: Place) -> None:
        asked = {"model": "demo-llama", "prompt": STORY, "max_tokens": 8, "temperature": 1.2}
        got = place.post("completions", asked).json()
        again = place.post("completions", {**asked, "seed": got["timings"]["seeds"][0]}).json()
        assert again["choices"][0]["text"] == got["choices"][0]["text"]

    def test_a_stream_of_a_chat(self, place: Place) -> None:
        asked: Any = {"messages": [{"role": "user", "content": STORY}], **GREEDY}
        whole = place.client.chat.completions.create(**asked)
        usage: Any = {"include_usage": True}
        chunks = list(
            place.client.chat.completions.create(**asked, stream=True, stream_options=usage)
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
        assert [d.finish_reason for d in deltas if d.finish_reason] == [
            whole.choices[0].finish_reason
        ]
        assert len(deltas) > 3
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert whole.usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_a_stream_ends_as_clients_expect(self, place: Place) -> None:
        got = place.post("completions", {"prompt": STORY, "stream": True, **GREEDY})
        assert got.headers["content-type"].startswith("text/event-stream")
        events = got.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] in ("stop", "length")
        assert "drafted" in last["timings"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_text_is_cut_before_a_stop_string(self, place: Place, stream: bool) -> None:
        whole = place.text(STORY, 24)
        stop = whole[10:16]  # across tokens, wherever they end
        asked = {"prompt": STORY, "stop": ["never said", stop], **GREEDY}
        if stream:
            chunks = list(place.client.completions.create(**asked, stream=True))
            text = "".join(chunk.choices[0].text for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            got = place.client.completions.create(**asked)
            text, reason = got.choices[0].text, got.choices[0].finish_reason
            assert got.usage is not None
            assert got.usage.completion_tokens < 24
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"

    def test_log_probabilities(self, place: Place) -> None:
        got = place.client.chat.completions.create(
            messages=[{"role": "user", "content": STORY}], logprobs=True, top_logprobs=3, **GREEDY
        )
        assert got.choices[0].logprobs is not None
        told = got.choices[0].logprobs.content or []
        assert "".join(each.token for each in told) == got.choices[0].message.content
        for each in told:  # greedy: the likeliest
            assert len(each.top_logprobs) == 3
            assert each.token == each.top_logprobs[0].token
            assert each.logprob == each.top_logprobs[0].logprob <= 0
        plain = place.client.completions.create(prompt=STORY, logprobs=2, **GREEDY)
        logprobs = plain.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.text_offset is not None
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert plain.choices[0].text[offset:].startswith(token)

    def test_penalties_and_bias_are_those_of_the_library(self, place: Place) -> None:
        width = len(place.served.tokenizer(STORY)["input_ids"])
        got = place.client.completions.create(
            prompt=STORY, frequency_penalty=1.5, presence_penalty=0.5, **GREEDY
        )
        penalties = Penalties(width, 1.5, 0.5)
        assert got.choices[0].text == place.text(STORY, 24, logits_processor=[penalties])
        token = place.alone(STORY, 1)[0]
        other = place.client.completions.create(
            prompt=STORY, logit_bias={str(token): -100}, **{**GREEDY, "max_tokens": 1}
        )
        assert other.choices[0].text != decode_text(place.served.tokenizer, [token])

    def test_a_prediction_is_looked_up(self, place: Place) -> None:
        prompt = "user: " + STORY + "\nassistant:"
        expected = place.text(prompt, 24)
        got = place.client.chat.completions.create(
            messages=[{"role": "user", "content": STORY}],
            prediction={"type": "content", "content": expected},
            **GREEDY,
        )
        assert got.choices[0].message.content == expected
        assert got.usage is not None
        details = got.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens or 0) > 5

    def test_json_of_a_schema(self, place: Place) -> None:
        schema = {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["age"],
            "additionalProperties": False,
        }
        form: Any = {"type": "json_schema", "json_schema": {"name": "someone", "schema": schema}}
        got = place.client.chat.completions.create(
            messages=[{"role": "user", "content": STORY}], response_format=form, **GREEDY
        )
        assert got.choices[0].finish_reason == "stop"
        age = json.loads(got.choices[0].message.content or "")
        assert list(age) == ["age"]
        assert 0 <= age["age"] <= 99
        wrong = {"type": "json_schema", "json_schema": {"schema": {"type": "colour"}}}
        for form in wrong, {"type": "json_object", "colour": 1}:
            with pytest.raises(openai.BadRequestError, match="response_format"):
                place.client.completions.create(
                    prompt=STORY, extra_body={"response_format": form}, **GREEDY
                )

    def test_eight_clients_at_once_get_their_lone_texts(self, place: Place) -> None:
        async def one(client: openai.AsyncOpenAI, seed: int) -> str:
            asked: Any = {"model": "demo-llama", "prompt": STORY + " cat" * seed, "seed": seed}
            asked |= {"temperature": 0.8, "max_tokens": 10 + seed}
            await asyncio.sleep(0.02 * seed)
            if seed % 2:
                return (await client.completions.create(**asked)).choices[0].text
            chunks = await client.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def all_of_them() -> list[str]:
            url = f"{place.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                return await asyncio.gather(*(one(client, seed) for seed in range(8)))

        for seed, text in enumerate(asyncio.run(all_of_them())):
            law = {"do_sample": True, "temperature": 0.8, "seeds": [seed]}
            assert text == place.text(STORY + " cat" * seed, 10 + seed, **law)


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "changed", "param", "words"),
        [
            ("completions", {"colour": 1}, "colour", "colour is not supported"),
            ("completions", {"suffix": "end"}, "suffix", "not supported"),
            ("completions", {"echo": True}, "echo", "not supported"),
            ("completions", {"prompt": []}, "prompt", "at least one token"),
            ("completions", {"prompt": ""}, "prompt", "at least one token"),
            ("completions", {"prompt": [-1]}, "prompt", "token ids must be"),
            ("completions", {"prompt": STORY * 200}, "prompt", "texts have 512 tokens"),
            ("completions", {"max_tokens": 512}, "max_tokens", "make it shorter"),
            ("completions", {"max_tokens": 0}, "max_tokens", "greater than"),
            ("completions", {"seed": "5"}, "seed", "valid integer"),
            ("completions", {"temperature": 1e-9}, "temperature", "0 or at least"),
            ("completions", {"temperature": 3}, "temperature", "less than or equal"),
            ("completions", {"stop": [""]}, "stop.0", "at least 1 character"),
            ("completions", {"logit_bias": {"100000000": 1}}, "logit_bias", "tokens are"),
            ("completions", {"stream_options": {}}, "stream_options", "needs stream"),
            ("chat/completions", {"tools": [{"type": "function"}]}, "tools", "not supported"),
            ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
            ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
            ("chat/completions", {"max_completion_tokens": 2}, "max_tokens", "give one"),
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages.0.content.0.type",
                "Input should be 'text'",
            ),
            (
                "chat/completions",
                {"messages": [{"role": "user", "content": "a", "name": "Eve"}]},
                "messages.0.name",
                "not supported",
            ),
        ],
    )
    def test_by_name(self, place: Place, path: str, changed: Any, param: str, words: str) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
        body = body if path.startswith("chat") else {"prompt": "a"}
        got = place.post(path, {**GREEDY, **body, **changed})
        assert got.status_code == 400
        error = got.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert error["type"] == "invalid_request_error"

    def test_what_asks_for_nothing_is_taken(self, place: Place) -> None:
        idle = {"tools": [], "user": "me", "store": False, "stop": None, "suffix": None}
        got = place.post("completions", {"prompt": STORY, **GREEDY, **idle})
        assert got.json()["choices"][0]["text"] == place.text(STORY, 24)

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"[" * 5000, b'{"model": NaN}', b'{"prompt": "\\ud800"}', b"\xff"],
    )
    def test_bad_json(self, place: Place, body: bytes) -> None:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        got = httpx.post(f"{place.url}/v1/completions", content=body, headers=headers)
        assert got.status_code == 400
        assert got.json()["error"]["message"]

    def test_other_models_paths_methods_and_kinds(self, place: Place) -> None:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            place.client.completions.create(model="gpt", prompt="a")
        headers = {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(f"{place.url}/v1/nothing").status_code == 404
        got = httpx.get(f"{place.url}/v1/completions", headers=headers)
        assert got.status_code == 405
        assert "not served" in got.json()["error"]["message"]
        got = httpx.post(f"{place.url}/v1/completions", content="{}", headers=headers)
        assert got.status_code == 415

    @pytest.mark.parametrize("key", ["x", "another", "a ké"])
    def test_a_wrong_key(self, place: Place, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}".encode()}
        for path in ("v1/models", "metrics"):
            got = httpx.get(f"{place.url}/{path}", headers=headers)
            assert got.status_code == 401
            assert got.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{place.url}/health").json() == {"status": "ok"}

    def test_a_body_that_is_too_large(self, place: Place) -> None:
        got = place.post("completions", {"prompt": "a" * 30_000, **GREEDY})
        assert got.status_code == 413
        pieces = (b" " * 5_000 for _ in range(10))  # without a length
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        got = httpx.post(f"{place.url}/v1/completions", content=pieces, headers=headers)
        assert got.status_code == 413

    def test_a_queue_that_is_full(self, place: Place) -> None:
        got = place.post("completions", {**LONG, "n": 128, "prompt": [STORY, STORY]})
        assert got.status_code == 429
        assert got.headers["retry-after"] == "1"
        assert got.json()["error"]["code"] == "queue_full"
        assert waits_until(lambda: place.serving.stats.rows + place.serving.stats.waiting == 0)


class TestEnds:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_ends_its_texts(self, place: Place, stream: bool) -> None:
        stats = place.serving.stats
        before = cancelled(place)
        body = {**LONG, "stream": stream, "n": 8}
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(headers=headers, timeout=None if stream else 0.2) as client:
            if stream:
                with client.stream("POST", f"{place.url}/v1/completions", json=body) as got:
                    next(got.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{place.url}/v1/completions", json=body)
        assert waits_until(lambda: cancelled(place) > before)
        assert waits_until(lambda: place.serving.stats.rows == 0), stats

    def test_a_client_that_does_not_read_holds_nobody_up(self, place: Place) -> None:
        asked = {**LONG, "temperature": 0, "stream": True, "n": 8, "logprobs": 5, "max_tokens": 60}
        body = json.dumps(asked).encode()
        address = place.url.removeprefix("http://")
        host, port = address.split(":")
        lines = [
            "POST /v1/completions HTTP/1.0",
            f"Host: {address}",
            f"Authorization: Bearer {KEY}",
        ]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        with socket.socket() as slow, pytest.MonkeyPatch.context() as patch:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            unsent: list[int] = []
            put = http._Running._put

            def counted(self: Any, index: int, piece: Any) -> None:
                put(self, index, piece)
                unsent.append(len(self._told))

            patch.setattr(http._Running, "_put", counted)
            slow.sendall("\r\n".join(lines).encode() + body)
            assert waits_until(lambda: place.serving.stats.rows == 8)
            got = place.client.completions.create(prompt=STORY, **GREEDY)
            assert got.choices[0].text == place.text(STORY, 24)
            # its texts end, too, though nobody has read them
            assert waits_until(lambda: place.serving.stats.rows == 0)
            assert max(unsent) == 8
            with slow.makefile("rb") as answer:
                lines = answer.read().decode().split("\n")
        events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
        text = "".join(chunk["text"] for chunk in chunks if chunk["index"] == 7)
        assert text == place.text(STORY, 60)
        assert len(chunks) < 8 * 40  # pieces that waited were sent together

    def test_time_is_limited_and_nothing_is_told_of_a_failure(self, place: Place) -> None:
        class Failing:
            """Takes tasks and fails, or never tells anything."""

            stats = place.serving.stats

            def start(self) -> None: ...
            def stop(self) -> None: ...
            def cancel(self, ticket: Any) -> None: ...

            def submit(self, task: Any, tell: Any) -> Any:
                if task.seed == 1:
                    raise RuntimeError("/a/path/of/this/machine")
                return object()

        with running(make_app(Failing(), place.served, timeout=0.3)) as url:
            got = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a", "seed": 1})
            assert got.status_code == 500
            assert "path" not in got.text
            got = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"})
            assert got.status_code == 504
            body = {**GREEDY, "prompt": "a", "stream": True}
            assert '"code":"timeout"' in httpx.post(f"{url}/v1/completions", json=body).text

    def test_health_tells_of_a_thread_that_has_ended(self, place: Place) -> None:
        serving = Serving(place.model, execution="fused", controller="fixed", draft_memory=0)
        with running(make_app(serving, place.served)) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            serving.stop()
            got = httpx.get(f"{url}/health")
            assert got.status_code == 503
            assert "ended" in got.json()["status"]

    def test_metrics(self, place: Place) -> None:
        place.client.completions.create(prompt=STORY, **GREEDY)
        text = metrics(place)
        for name in ("requests_total", "texts_total", "drafted_tokens_total", "rows", "waiting"):
            assert f"layerskip_{name}" in text
        assert 'requests_total{path="/v1/completions",status="200"}' in text


def metrics(place: Place) -> str:
    return httpx.get(f"{place.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text


def cancelled(place: Place) -> float:
    lines = [line for line in metrics(place).splitlines() if 'reason="cancelled"' in line]
    return float(lines[0].split()[-1]) if lines and "texts_total" in lines[0] else 0.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "192.0.2.1"], "cannot listen at --host 192.0.2.1 --port 8000"),
        (["--api-key", " "], "--api-key is empty"),
        (["--port", "0", "no-such-folder/a/b"], "no-such-folder/a/b"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], words: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main.app(["serve", *flags], prog_name="layerskip")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1]


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_are_never_split(size: int) -> None:
    text = "naïve 漢字 👩‍👩‍👧 end"
    data, decoder = list(text.encode()), Detokenizer(Bytes())
    told = [decoder.put(data[i : i + size]) for i in range(0, len(data), size)]
    assert "\ufffd" not in "".join(told)
    assert "".join(told) + decoder.end() == text


def test_half_a_character_is_told_at_the_end() -> None:
    decoder = Detokenizer(Bytes())
    assert decoder.put("é".encode()[:1]) == ""
    assert decoder.end() == "\ufffd"


def test_a_stop_string_of_the_prompt_does_not_count() -> None:
    prompt, stop = b"the end", StopStrings(Bytes(), ["end", "é!"], 7)
    assert not stop(0, torch.tensor([list(prompt)]))
    assert not stop(0, torch.tensor([list(prompt + b" e")]))
    assert stop(0, torch.tensor([list(prompt + b" an end")]))
    assert stop(0, torch.tensor([list(prompt + b"x" * 50 + "é!".encode())]))
