"""`layerskip serve`: what clients of OpenAI's interface get, over real connections."""

import asyncio
import json
import socket
import time
from copy import copy

import httpx
import openai
import pytest
import torch
from checkpoints import shallow_demo
from commands import refused
from models import lively_model, scripted
from servers import running
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, RepetitionPenaltyLogitsProcessor

from layerskip import decode, load
from layerskip.cli import main
from layerskip.serving import connections, fields, http
from layerskip.serving.fields import ChatRequest, CompletionRequest
from layerskip.serving.formats import FORMATS
from layerskip.serving.history import Penalties, StopStrings
from layerskip.serving.http import make_app
from layerskip.serving.openai_api import Served, answer_of
from layerskip.serving.requests import Piece, Refusal
from layerskip.serving.responses import ResponseRequest
from layerskip.serving.scheduler import Serving, ServingStats
from layerskip.texts.grammars import Grammar, GrammarLimit
from layerskip.texts.tokens import Detokenizer, decode_text, token_bytes

TOOLS_TEMPLATE = (
    "{% if tools %}<tool_call> {{ tools | tojson }}\n{% endif %}{% for m in messages %}"
    "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{{ '\\n' }}"
    "{% endfor %}assistant:{% if think %} <think>{% endif %}{# </think> #}"
)
FUNCTION = {"name": "f", "parameters": {"properties": {"x": {"enum": [1, 23]}}, "required": ["x"]}}
TOOL = {"type": "function", "function": FUNCTION}
THIS, NAMED = ({"type": "function", "function": {"name": name}} for name in "fg")
BAD_TOOL = {"type": "function", "function": {"name": "a b"}}
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "colour"}}}
WRONG_CALL = {"tools": [WRONG_TOOL], "tool_choice": "required"}
FORM = {"type": "json_schema", "json_schema": {"schema": {"enum": [17]}}}
LOST = {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/A"}}}}
LOST_CALL = {"tools": [{"type": "function", "function": LOST}], "tool_choice": "required"}
RING = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
SOUND, EMPTY = (
    {"messages": [{"role": "user", "content": [{"type": kind}]}]}
    for kind in ("input_audio", "image_url")
)
PADDED = {"chat_template_kwargs": {"padding": "max_length", "max_length": 10**6}}
STORY = "Once upon a time there was a little"
KEY, SITE = "a key", "https://example.org"
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Place:
    """A served model, and how to reach it."""

    def __init__(self, **known):
        vars(self).update(known)

    def post(self, path, body, **kwargs):
        return httpx.post(f"{self.url}/v1/{path}", json=body, headers=HEADERS, **kwargs)

    def alone(self, prompt, new, **law):
        """The tokens that plain decoding gives for a prompt alone."""
        ids = torch.tensor([self.served.tokenizer(prompt)["input_ids"]])  # (1, T)
        settings = {"execution": "fused", "max_new_tokens": new, "top_k": 0, "top_p": 1.0}
        settings["enabled"] = False
        rounds = decode(self.model, ids, **{**settings, **law})
        return [token for round_ in rounds for token in round_.tokens[0]]

    def text(self, prompt, new, **law):
        return decode_text(self.served.tokenizer, self.alone(prompt, new, **law))


@pytest.fixture(scope="module")
def place():
    loaded = load(shallow_demo(), dtype="float32")
    loaded.tokenizer.chat_template = TOOLS_TEMPLATE
    served = Served(loaded, max_new_tokens=12)
    drafts = {"controller": "fixed", "lookup": True, "draft_memory": 0}
    serving = Serving(loaded.model, max_tokens=served.context, execution="fused", **drafts)
    app = make_app(serving, served, api_key=KEY, max_body=25_000, origins=[SITE])
    how = {"api_key": KEY, "max_retries": 0}
    with running(app) as url, openai.OpenAI(base_url=f"{url}/v1", **how) as client:
        yield Place(url=url, client=client, served=served, model=loaded.model, serving=serving)


def waits_until(what):
    end = time.monotonic() + 20
    while not what() and time.monotonic() < end:
        time.sleep(0.01)
    return what()


GREEDY = {"model": "demo-llama", "temperature": 0, "max_tokens": 24}
LONG = {"model": "demo-llama", "prompt": STORY, "max_tokens": 400, "temperature": 1.0}


class TestAnswers:
    def test_models(self, place):
        assert [model.id for model in place.client.models.list()] == ["demo-llama"]
        assert place.client.models.retrieve("demo-llama").owned_by == "layerskip"
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            place.client.models.retrieve("other")

    def test_a_completion_is_the_text_of_the_library(self, place):
        got = place.client.completions.create(prompt=STORY, **GREEDY)
        tokens = place.alone(STORY, 24)
        assert got.choices[0].text == decode_text(place.served.tokenizer, tokens)
        assert got.usage.completion_tokens == len(tokens)
        assert got.usage.prompt_tokens == len(place.served.tokenizer(STORY)["input_ids"])
        timings = (got.model_extra or {})["timings"]
        assert 0 <= timings["accepted"] <= timings["drafted"]
        assert timings["seconds"] > 0

    def test_a_chat_goes_through_the_template(self, place):
        parts = [{"type": "text", "text": "Tell"}, {"type": "text", "text": " me."}]
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

    def test_a_prompt_in_tokens_and_a_default_length(self, place):
        ids = place.served.tokenizer(STORY)["input_ids"]
        got = place.client.completions.create(model="demo-llama", prompt=ids, temperature=0)
        assert got.choices[0].text == place.text(STORY, 12)

    def test_several_prompts_and_choices_each_with_its_seed(self, place):
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
        both = sum(len(place.served.tokenizer(p)["input_ids"]) for p in prompts)
        assert got.usage.prompt_tokens == both

    def test_cached_tokens_are_those_of_all_prompts(self, place):
        for prompts in (STORY, [STORY, STORY]):
            got = place.client.completions.create(prompt=prompts, n=2, **GREEDY)
        one = len(place.served.tokenizer(STORY)["input_ids"]) - 1  # all but the last token
        assert got.usage.prompt_tokens_details.cached_tokens == 2 * one

    def test_a_seed_is_drawn_and_told(self, place):
        asked = {"model": "demo-llama", "prompt": STORY, "max_tokens": 8, "temperature": 1.2}
        got = place.post("completions", asked).json()
        again = place.post("completions", {**asked, "seed": got["timings"]["seeds"][0]}).json()
        assert again["choices"][0]["text"] == got["choices"][0]["text"]

    def test_a_stream_of_a_chat(self, place):
        asked = {"messages": [{"role": "user", "content": STORY}], **GREEDY}
        whole = place.client.chat.completions.create(**asked)
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(place.client.chat.completions.create(**asked))
        assert chunks[0].choices[0].delta.role == "assistant"
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(d.delta.content or "" for d in deltas) == whole.choices[0].message.content
        [reason] = [d.finish_reason for d in deltas if d.finish_reason]
        assert reason == whole.choices[0].finish_reason
        assert len(deltas) > 3
        assert chunks[-1].choices == []
        assert all("usage" in chunk.model_fields_set for chunk in chunks)
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    def test_a_stream_ends_as_clients_expect(self, place):
        got = place.post("completions", {"prompt": STORY, "stream": True, **GREEDY})
        assert got.headers["content-type"].startswith("text/event-stream")
        events = got.text.strip().split("\n\n")
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] in ("stop", "length")
        assert "drafted" in last["timings"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_text_is_cut_before_a_stop_string(self, place, stream):
        whole = place.text(STORY, 24)
        stop = whole[10:16]  # crosses tokens
        asked = {"prompt": STORY, "stop": ["never said", stop], **GREEDY}
        if stream:
            chunks = list(place.client.completions.create(**asked, stream=True))
            text = "".join(chunk.choices[0].text for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            got = place.client.completions.create(**asked)
            text, reason = got.choices[0].text, got.choices[0].finish_reason
            assert got.usage.completion_tokens < 24
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"

    def test_log_probabilities(self, place):
        got = place.client.chat.completions.create(
            messages=[{"role": "user", "content": STORY}], logprobs=True, top_logprobs=3, **GREEDY
        )
        told = got.choices[0].logprobs.content or []
        assert "".join(each.token for each in told) == got.choices[0].message.content
        for each in told:  # greedy: the most probable
            assert len(each.top_logprobs) == 3
            assert each.token == each.top_logprobs[0].token
            assert each.logprob == each.top_logprobs[0].logprob <= 0
        plain = place.client.completions.create(prompt=STORY, logprobs=2, **GREEDY)
        logprobs = plain.choices[0].logprobs
        for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
            assert plain.choices[0].text[offset:].startswith(token)

    def test_bytes_of_tokens_with_part_of_a_character(self, place):
        text = "A fox: \U0001f98a!"
        tokens = place.served.tokenizer.encode(text, add_special_tokens=False)
        told = Piece(tokens, [{token: -1.0} for token in tokens], reason="stop")
        asked = {"logprobs": True, "top_logprobs": 1}
        answer = answer_of(ChatRequest(**ASKED, **asked), place.served)
        answer.add(0, told)
        [choice] = answer.whole()["choices"]
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(each["bytes"]) for each in content) == text.encode()
        assert [top["bytes"] for each in content for top in each["top_logprobs"]] == [
            each["bytes"] for each in content
        ]
        answer = answer_of(CompletionRequest(**GREEDY, prompt="a", logprobs=1), place.served)
        answer.add(0, told)
        logprobs = answer.whole()["choices"][0]["logprobs"]
        assert logprobs["tokens"][-5:] == [*(f"bytes:\\x{b:02x}" for b in b"\xf0\x9f\xa6\x8a"), "!"]
        assert logprobs["top_logprobs"] == [{token: -1.0} for token in logprobs["tokens"]]

    def test_penalties_and_bias_are_those_of_the_library(self, place):
        penalties = Penalties(len(place.served.tokenizer(STORY)["input_ids"]), 1.5, 0.5)
        for asked, processor in (
            ({"frequency_penalty": 1.5, "presence_penalty": 0.5}, penalties),
            ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        ):
            got = place.client.completions.create(prompt=STORY, extra_body=asked, **GREEDY)
            expected = place.text(STORY, 24, logits_processor=[processor])
            assert got.choices[0].text == expected != place.text(STORY, 24)
        token = place.alone(STORY, 1)[0]
        other = place.client.completions.create(
            prompt=STORY, logit_bias={str(token): -100}, **{**GREEDY, "max_tokens": 1}
        )
        assert other.choices[0].text != decode_text(place.served.tokenizer, [token])

    def test_a_prediction_is_looked_up(self, place):
        prompt = "user: " + STORY + "\nassistant:"
        expected = place.text(prompt, 24)
        got = place.client.chat.completions.create(
            messages=[{"role": "user", "content": STORY}],
            prediction={"type": "content", "content": expected},
            **GREEDY,
        )
        assert got.choices[0].message.content == expected
        details = got.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens or 0) > 5

    def test_json_of_a_schema(self, place):
        schema = {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["age"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "someone", "schema": schema}}
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

    def test_eight_clients_at_once_get_their_lone_texts(self, place):
        async def one(client, seed):
            asked = {"model": "demo-llama", "prompt": STORY + " cat" * seed, "seed": seed}
            asked |= {"temperature": 0.8, "max_tokens": 10 + seed}
            await asyncio.sleep(0.02 * seed)
            if seed % 2:
                return (await client.completions.create(**asked)).choices[0].text
            chunks = await client.completions.create(**asked, stream=True)
            return "".join([chunk.choices[0].text async for chunk in chunks])

        async def all_of_them():
            url = f"{place.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
                return await asyncio.gather(*(one(client, seed) for seed in range(8)))

        for seed, text in enumerate(asyncio.run(all_of_them())):
            law = {"do_sample": True, "temperature": 0.8, "seeds": [seed]}
            assert text == place.text(STORY + " cat" * seed, 10 + seed, **law)


ASKED = {**GREEDY, "messages": [{"role": "user", "content": STORY}]}


class TestTools:
    @pytest.mark.parametrize("choice", ["required", THIS])
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_that_is_asked_for(self, place, choice, stream):
        """A grammar enforces the schema, also for drafts. Streamed answers consist of deltas."""
        how = {**ASKED, "tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
        how["parallel_tool_calls"] = False
        if stream:
            chunks = list(place.client.chat.completions.create(**how, stream=True))
            deltas = [chunk.choices[0].delta for chunk in chunks]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert calls[0].id
            assert {call.index for call in calls} == {0}
            name = calls[0].function.name
            arguments = "".join(call.function.arguments or "" for call in calls)
            assert "".join(delta.content or "" for delta in deltas) == ""
            reason = chunks[-1].choices[0].finish_reason
        else:
            got = place.client.chat.completions.create(**how)
            [call] = got.choices[0].message.tool_calls or ()
            name, arguments = call.function.name, call.function.arguments
            assert got.choices[0].message.content is None
            assert got.model_extra["timings"]["accepted"] > 5
            reason = got.choices[0].finish_reason
        assert name == "f"
        assert json.loads(arguments)["x"] in (1, 23)
        assert reason == ("tool_calls" if choice == "required" else "stop")

    def test_tools_are_shown_to_the_model_unless_none_may_be_called(self, place):
        def prompt(**more):
            body = ChatRequest(**ASKED, **more)
            [choice] = answer_of(body, place.served).choices
            return place.served.tokenizer.decode(choice.task.prompt)

        assert '"name": "f"' in prompt(tools=[TOOL])
        assert "tool_call" not in prompt(tools=[TOOL], tool_choice="none")
        assert prompt(chat_template_kwargs={"think": True}).endswith("<think>")
        called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        history = [
            {"role": "user", "content": "a", "name": "Eve"},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": "seven"},
        ]
        body = ChatRequest(**{**ASKED, "messages": history})
        [choice] = answer_of(body, place.served).choices
        expected = 'user: a\nassistant: <tool_call>f {"x": 1}\ntool: seven\nassistant:'
        assert place.served.tokenizer.decode(choice.task.prompt) == expected

    def test_arguments_with_more_brackets_than_can_be_read_stay_text(self):
        called = {"function": {"name": "f", "arguments": "[" * 100_000}}
        history = [{"role": "assistant", "tool_calls": [called]}]
        [message] = ChatRequest(**{**ASKED, "messages": history}).messages
        assert message.for_template()["tool_calls"][0]["function"] == called["function"]

    def test_answers_are_taken_apart(self, place):
        """Reasoning, content and a call in one text become parts of one message."""
        told = Piece(
            tuple(
                place.served.tokenizer.encode(
                    "I think</think>Look:"
                    '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>',
                    add_special_tokens=False,
                )
            ),
            reason="stop",
        )
        more = {"tools": [TOOL], "chat_template_kwargs": {"think": True}}
        answer = answer_of(ChatRequest(**ASKED, **more), place.served)
        [chunk] = answer.add(0, told)
        [choice] = answer.whole()["choices"]
        assert choice["finish_reason"] == "tool_calls"
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("I think", "Look:")
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
        assert chunk["choices"][0]["delta"]["reasoning_content"] == "I think"

    @pytest.mark.parametrize("size", [3, 1000])
    def test_what_only_looks_like_a_call_is_content(self, place, size):
        """A name that is not declared, and any JSON that was asked for as such."""
        served = copy(place.served)
        served.format = FORMATS["llama3"]
        call = '{"name": "f", "parameters": {"x": 1}}'
        for text, form in (('{"name": "Alice", "age": 30}', None), (call, FORM), (call, None)):
            asked = ChatRequest(**ASKED, tools=[TOOL], response_format=form)
            answer = answer_of(asked, served)
            tokens, chunks = served.tokenizer.encode(text, add_special_tokens=False), []
            for at in range(0, len(tokens), size):
                end = None if at + size < len(tokens) else "stop"
                chunks += answer.add(0, Piece(tokens[at : at + size], reason=end))
            streamed = "".join(each["choices"][0]["delta"].get("content", "") for each in chunks)
            [choice] = answer.whole()["choices"]
            called = text == call and form is None
            assert (choice["message"]["content"] or "") == streamed == ("" if called else text)
            assert ("tool_calls" in choice["message"]) is called
            assert choice["finish_reason"] == ("tool_calls" if called else "stop")

    @pytest.mark.parametrize("how", [{"tool_choice": "required"}, {"tool_choice": THIS}, FORM])
    def test_what_is_forced_follows_reasoning_that_the_template_opens(self, place, how):
        how = {"response_format": FORM} if how is FORM else {"tools": [TOOL], **how}
        asked = ChatRequest(**ASKED, **how, chat_template_kwargs={"think": True})
        answer = answer_of(asked, place.served)
        task = answer.choices[0].task
        script = place.served.tokenizer.encode("Hm.</think>\n", add_special_tokens=False)
        processors = [*task.processors, scripted(script, len(task.prompt))]
        ids, settings = torch.tensor([task.prompt]), {"execution": "fused", "draft_memory": 0}
        rounds = decode(
            *(place.model, ids),
            **{"max_new_tokens": 90, "logits_processor": processors, **settings},
        )
        answer.add(0, Piece([t for each in rounds for t in each.tokens[0]], reason="stop"))
        message = answer.whole()["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        if "tools" in how:
            call = message["tool_calls"][0]["function"]
            assert (call["name"], json.loads(call["arguments"])["x"] in (1, 23)) == ("f", True)
        else:
            assert message["content"] == "17"

    def test_a_model_without_a_format_of_calls(self, place):
        plain = copy(place.served)
        plain.format = None
        with pytest.raises(Refusal, match="start the server with --tool-parser"):
            answer_of(ChatRequest(**ASKED, tools=[TOOL]), plain)
        answer_of(ChatRequest(**ASKED, tools=[TOOL], tool_choice="none"), plain)


INPUT = {"model": "demo-llama", "input": STORY, "temperature": 0, "max_output_tokens": 12}


class TestResponses:
    def test_a_text_whole_and_streamed(self, place):
        got = place.client.responses.create(**INPUT, instructions="Be kind.")
        prompt = f"system: Be kind.\nuser: {STORY}\nassistant:"
        assert got.output_text == place.text(prompt, 12)
        assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert got.output[0].status == "incomplete"
        assert got.usage.output_tokens == 12
        events = list(place.client.responses.create(**INPUT, instructions="Be kind.", stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert text == got.output_text == events[-1].response.output_text
        kinds = [event.type for event in events if "delta" not in event.type]
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_call_and_its_result(self, place, stream):
        how = {**INPUT, "tools": [{"type": "function", **FUNCTION}]}
        how |= {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 60}
        if stream:
            with place.client.responses.stream(**how) as events:
                arguments = "".join(
                    e.delta for e in events if e.type == "response.function_call_arguments.delta"
                )
                got = events.get_final_response()
            assert got.output[0].arguments == arguments
        else:
            got = place.client.responses.create(**how)
        [call] = got.output
        assert (call.type, call.name, got.status) == ("function_call", "f", "completed")
        assert json.loads(call.arguments)["x"] in (1, 23)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "seven"}
        history = [{"role": "user", "content": STORY}, call.to_dict(), result]
        body = ResponseRequest(**{**INPUT, "input": history}).chat()
        [choice] = answer_of(body, place.served).choices
        told = place.served.tokenizer.decode(choice.task.prompt)
        x = json.loads(call.arguments)["x"]
        calls = f'assistant: <tool_call>f {{"x": {x}}}'
        assert told == f"user: {STORY}\n{calls}\ntool: seven\nassistant:"

    def test_reasoning_and_what_follows_it_are_one_turn(self):
        thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        said = {"role": "assistant", "content": "Yes."}
        body = ResponseRequest(**{**INPUT, "input": [thought, said, thought, call, said]}).chat()
        told = [message.for_template() for message in body.messages]
        assert [each["content"] for each in told] == ["Yes.", "", "Yes."]
        assert [each.get("reasoning_content") for each in told] == ["Hm.", "Hm.", None]
        assert ["tool_calls" in each for each in told] == [False, True, False]

    def test_forms_and_refusals(self, place):
        form = {"type": "json_schema", "name": "n", "schema": {"enum": [17]}}
        got = place.client.responses.create(**INPUT, text={"format": form})
        assert got.output_text == "17"
        for wrong, words in (
            ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
            ({"input": []}, "input: "),
            ({"input": [{"role": "user"}]}, "input.0.content: Field required"),
            ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0: type must be message,"),
            ({"temperature": -1}, "greater than or equal to 0"),
            ({"max_output_tokens": 512}, "max_output_tokens asks for 512 more; make it shorter"),
            ({"store": True}, "store is not supported"),
        ):
            answer = place.post("responses", {**INPUT, **wrong})
            assert answer.status_code == 400
            assert words in answer.json()["error"]["message"]


class TestEvaluation:
    """What evaluation tools request."""

    def test_log_probabilities_of_prompts(self, place):
        ids = place.served.tokenizer(STORY)["input_ids"]
        with torch.no_grad():
            logits = place.model(torch.tensor([ids])).logits[0]  # (T, V)
        expected = logits[:-1].log_softmax(-1)[range(len(ids) - 1), ids[1:]]
        for prompt in (STORY, ids, STORY):
            for new in (0, 1):
                asked = {**GREEDY, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": new}
                got = place.post("completions", asked).json()
                text, told = got["choices"][0]["text"], got["choices"][0]["logprobs"]
                assert text == STORY + place.text(STORY, 1) * new
                assert got["usage"]["completion_tokens"] == new
                assert told["token_logprobs"][0] is None
                assert len(told["tokens"]) == len(ids) + new
                got_them = torch.tensor(told["token_logprobs"][1 : len(ids)])
                torch.testing.assert_close(got_them, expected, atol=1e-4, rtol=1e-4)
                assert "".join(told["tokens"]) == text
                for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
                    assert text[offset:].startswith(token)

    def test_a_stream_begins_with_the_prompt(self, place):
        asked = {**GREEDY, "prompt": STORY, "echo": True, "stream": True}
        chunks = place.client.completions.create(**asked)
        assert "".join(each.choices[0].text for each in chunks) == STORY + place.text(STORY, 24)

    def test_the_same_seed_for_each_prompt(self, place):
        asked = {"model": "demo-llama", "prompt": [STORY] * 3, "seed": 5, "temperature": 1.0}
        texts = [c["text"] for c in place.post("completions", asked).json()["choices"]]
        same = place.post("completions", {**asked, "same_seed": True}).json()["choices"]
        assert {c["text"] for c in same} == {texts[0]}
        assert len({*texts}) > 1

    def test_ends_of_ones_own(self, place):
        tokens = place.alone(STORY, 24)
        asked = {**GREEDY, "prompt": STORY}
        got = place.post("completions", {**asked, "stop_token_ids": [tokens[5]]}).json()
        assert got["choices"][0]["finish_reason"] == "stop"
        assert got["usage"]["completion_tokens"] == tokens.index(tokens[5]) + 1
        bias = {str(token): 100 for token in place.served.ends}
        ended = place.post("completions", {**asked, "logit_bias": bias}).json()
        assert ended["usage"]["completion_tokens"] == 1
        on = place.post("completions", {**asked, "logit_bias": bias, "ignore_eos": True}).json()
        assert on["usage"]["completion_tokens"] == 24

    def test_tokens_of_texts_and_chats(self, place):
        def post(path, body):
            return httpx.post(f"{place.url}/{path}", json=body, headers=HEADERS).json()

        tokenizer = place.served.tokenizer
        got = post("tokenize", {"prompt": STORY, "return_token_strs": True})
        assert got["tokens"] == tokenizer(STORY)["input_ids"]
        assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), 512)
        assert got["token_strs"] == tokenizer.convert_ids_to_tokens(got["tokens"])
        assert post("detokenize", {"tokens": got["tokens"]}) == {"prompt": STORY}
        info = httpx.get(f"{place.url}/tokenizer_info", headers=HEADERS).json()
        assert info["eos_token"] == tokenizer.eos_token
        assert info["chat_template"] == TOOLS_TEMPLATE
        chat = post("tokenize", {"messages": [{"role": "user", "content": "a"}]})
        assert tokenizer.decode(chat["tokens"]) == "user: a\nassistant:"
        assert "no model 'x'" in post("tokenize", {"prompt": "a", "model": "x"})["error"]["message"]
        assert "either prompt or messages" in post("tokenize", {})["error"]["message"]
        assert "token ids must be" in post("detokenize", {"tokens": [-1]})["error"]["message"]

    def test_a_prediction_is_cut_to_what_a_text_may_have(self, place):
        long = {"type": "content", "content": "one two " * 100_000}
        body = CompletionRequest(**GREEDY, prompt=STORY, n=3, prediction=long)
        answer = answer_of(body, place.served)
        predicted = {id(choice.task.predicted) for choice in answer.choices}
        assert len(predicted) == 1
        assert len(answer.choices[0].task.predicted) == place.served.context


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "changed", "param", "words"),
        [
            ("completions", {"colour": 1}, "colour", "colour is not supported"),
            ("completions", {"suffix": "end"}, "suffix", "not supported"),
            ("completions", {"prompt": []}, "prompt", "at least one token"),
            ("completions", {"prompt": [-1]}, "prompt", "token ids must be"),
            ("completions", {"prompt": STORY * 200}, "prompt", "texts have at most 512 tokens"),
            ("completions", {"max_tokens": 512}, "max_tokens", "make it shorter"),
            ("completions", {"max_tokens": -1}, "max_tokens", "greater than"),
            ("completions", {"max_tokens": 2**63}, "max_tokens", "less than"),
            ("completions", {"top_k": 2**63}, "top_k", "less than"),
            ("completions", {"prompt": "a" * 24_000}, "prompt", "24000 characters, more than"),
            ("completions", {"seed": "5"}, "seed", "valid integer"),
            ("completions", {"seed": -1}, "seed", "greater than or equal to 0, got -1"),
            ("completions", {"stop_token_ids": [-1]}, "stop_token_ids", "token ids must be"),
            ("completions", {"temperature": -1e-9}, "temperature", "greater than or equal to 0"),
            ("completions", {"stop": [""]}, "stop.0", "at least 1 character"),
            ("completions", {"stop": ["a"] * 17}, "stop", "at most 16 items"),
            ("completions", {"prompt": 5}, "prompt", "valid string or a valid array, got 5"),
            ("completions", {"logit_bias": {"100000000": 1}}, "logit_bias", "token ids must"),
            ("completions", {"logit_bias": {"1" * 5000: 1}}, "logit_bias", "111...'"),
            ("completions", {"response_format": RING}, "response_format", "form a cycle"),
            ("embeddings", {}, None, "embeddings are not served here"),
            ("completions", {"stream_options": {}}, "stream_options", "needs stream"),
            ("chat/completions", {"max_tokens": 0}, "max_tokens", "greater than"),
            ("chat/completions", {"tools": [{"type": "x"}]}, "tools.0.type", "Input should be"),
            ("chat/completions", {"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "'g'"),
            ("chat/completions", {"tool_choice": "required"}, "tool_choice", "needs tools"),
            ("chat/completions", {"tool_choice": NAMED}, "tool_choice", "tools are none"),
            ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0", "needs content"),
            ("chat/completions", {"tools": [BAD_TOOL]}, "tools.0.function.name", "match pattern"),
            ("chat/completions", WRONG_CALL, "tools", "llguidance refuses"),
            ("chat/completions", LOST_CALL, "tools", "Pointer '/$defs/A' does not exist"),
            ("chat/completions", {"messages": []}, "messages", "at least 1 item"),
            ("chat/completions", SOUND, "messages.0.content.0.type", "be 'text' or 'image_url'"),
            ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
            ("chat/completions", {"max_completion_tokens": 2}, "max_tokens", "give one"),
            ("chat/completions", PADDED, "chat_template_kwargs", "padding"),
            ("chat/completions", EMPTY, "messages.0.content.0", "image_url needs image_url"),
        ],
    )
    def test_by_name(self, place, path, changed, param, words):
        body = {"messages": [{"role": "user", "content": "a"}]}
        body = body if path.startswith("chat") else {"prompt": "a"}
        got = place.post(path, {**GREEDY, **body, **changed})
        assert got.status_code == 400
        error = got.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert "%json" not in error["message"]
        assert error["type"] == "invalid_request_error"

    def test_a_grammar_that_grows_too_large_while_it_is_written(self, place, monkeypatch):
        def mask(self, scores):
            raise GrammarLimit("the grammar failed: too large; simplify it")

        monkeypatch.setattr(Grammar, "mask", mask)
        got = place.post("completions", {**GREEDY, "prompt": STORY, "response_format": FORM})
        assert got.status_code == 400
        assert "too large; simplify it" in got.json()["error"]["message"]

    def test_what_asks_for_nothing_is_taken(self, place):
        idle = {"user": "me", "store": False, "stop": None, "suffix": None, "top_k": -1}
        idle |= {"repetition_penalty": 1.0, "skip_special_tokens": True}
        idle |= {"max_completion_tokens": 24}  # guidellm sends both maxima
        got = place.post("completions", {"prompt": STORY, **GREEDY, **idle})
        assert got.json()["choices"][0]["text"] == place.text(STORY, 24)

    def test_fields_of_other_servers_that_have_no_effect_are_told_once(self, place, caplog):
        fields._tell_idle.cache_clear()
        idle = {"cache_prompt": True, "keep_alive": "5m", "prompt_cache_retention": "24h"}
        cached = {"cache_control": {"type": "ephemeral"}}
        part = {"type": "text", "text": STORY, **cached}
        for _ in range(2):
            got = place.post("completions", {"prompt": STORY, **GREEDY, **idle, **cached})
            assert got.json()["choices"][0]["text"] == place.text(STORY, 24)
            said = [{"role": "user", "content": [part]}]
            assert place.post("chat/completions", {**ASKED, "messages": said}).status_code == 200
            how = {"text": {"verbosity": "low"}, "truncation": "auto", "top_logprobs": 0}
            assert place.post("responses", {**INPUT, **how}).status_code == 200
        told = [record.args[0] for record in caplog.records if record.name == fields.__name__]
        assert sorted(told) == sorted([*idle, *cached, "verbosity"])

    def test_names_and_values_of_other_servers(self, place):
        """A repeat penalty, no model, answers of a tool that are empty, and almost no noise."""
        asked = {"prompt": STORY, "max_tokens": 24, "seed": 1}
        greedy = place.post("completions", {**asked, "temperature": 1e-7}).json()
        assert greedy["model"] == "demo-llama"
        assert greedy["choices"][0]["text"] == place.text(STORY, 24)
        for name in ("repeat_penalty", "repetition_penalty"):
            got = place.post("completions", {**asked, "temperature": 0, name: 1.7}).json()
            law = {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.7)]}
            assert got["choices"][0]["text"] == place.text(STORY, 24, **law)
        called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        history = [
            {"role": "assistant", "reasoning": "Hm.", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "1", "content": None},
        ]
        body = ChatRequest(**{**ASKED, "messages": history, "top_logprobs": 0})
        assert body.num_logprobs is None
        thought, result = [message.for_template() for message in body.messages]
        assert (thought["reasoning_content"], result["content"]) == ("Hm.", "")
        calls = [
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": None},
        ]
        asked = {name: value for name, value in INPUT.items() if name != "model"}
        got = place.post("responses", {**asked, "input": calls}).json()
        assert (got["model"], got["status"]) == ("demo-llama", "incomplete")

        [choice] = answer_of(ChatRequest(**{**ASKED, "temperature": 3}), place.served).choices
        assert choice.task.temperature == 3

    def test_the_root_says_where_the_api_is(self, place):
        assert "/v1" in httpx.get(f"{place.url}/").json()["message"]

    def test_a_queue_too_small_is_told_before_anything_is_encoded(self, place):
        """A small request for 2.5 million texts is refused at once."""

        class Full(Stub):
            check_room = place.serving.check_room

        blind = copy(place.served)
        blind.tokenizer = None
        with running(make_app(Full(), blind, max_body=1 << 20)) as url:
            body = {**GREEDY, "prompt": ["a"] * 20_000, "n": 128}
            got = httpx.post(f"{url}/v1/completions", json=body)
        assert got.status_code == 429
        assert "2560000 more were requested" in got.json()["error"]["message"]

    def test_a_head_that_never_ends(self, place, monkeypatch):
        monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
        host, port = place.url.removeprefix("http://").split(":")
        with httpx.Client() as client, socket.create_connection((host, int(port))) as slow:
            assert client.get(f"{place.url}/health").status_code == 200  # whole requests work
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
            slow.settimeout(30)
            assert slow.recv(100) == b""

    def test_a_body_that_never_ends(self, place, monkeypatch):
        monkeypatch.setattr(http, "BODY_SECONDS", 0.3)
        host, port = place.url.removeprefix("http://").split(":")
        lines = ["POST /v1/completions HTTP/1.1", "Host: a", f"Authorization: Bearer {KEY}"]
        lines += ["Content-Type: application/json", "Content-Length: 9", "", "{"]
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall("\r\n".join(lines).encode())
            slow.settimeout(30)
            assert slow.recv(100).startswith(b"HTTP/1.1 408")

    @pytest.mark.parametrize(
        "body",
        [b"", b"{", b"[]", b"[" * 5000, b'{"model": NaN}', b'{"prompt": "\\ud800"}', b"\xff"],
    )
    def test_bad_json(self, place, body):
        headers = {**HEADERS, "Content-Type": "application/json"}
        got = httpx.post(f"{place.url}/v1/completions", content=body, headers=headers)
        assert got.status_code == 400
        assert got.json()["error"]["message"]

    def test_other_models_paths_methods_and_kinds(self, place):
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            place.client.completions.create(model="gpt", prompt="a")
        assert httpx.get(f"{place.url}/v1/nothing").status_code == 404
        got = httpx.get(f"{place.url}/v1/completions", headers=HEADERS)
        assert (got.status_code, got.headers["allow"]) == (405, "POST")
        assert "not served" in got.json()["error"]["message"]
        got = httpx.post(f"{place.url}/v1/completions", content="{}", headers=HEADERS)
        assert got.status_code == 415

    @pytest.mark.parametrize("key", ["x", "another", "a ké"])
    def test_a_wrong_key(self, place, key):
        headers = {"Authorization": f"Bearer {key}".encode()}
        for path in ("v1/models", "metrics"):
            got = httpx.get(f"{place.url}/{path}", headers=headers)
            assert got.status_code == 401
            assert got.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{place.url}/health").json() == {"status": "ok"}

    def test_keys_with_other_letters_or_from_a_file_with_a_last_line_end(self, place):
        """Each has an owner of its own."""
        owners = []

        class Noting(Stub):
            def submit_all(self, requests):
                owners.append(requests[0][0].owner)
                raise ValueError("noted")

        with running(make_app(Noting(), place.served, api_key=["clé à\n", "other"])) as url:
            for key in ("clé à", "other", "clé à"):
                headers = {"Authorization": f"Bearer {key}".encode()}
                httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers)
        assert owners[0] == owners[2]
        assert len({*owners, ""}) == 3

    def test_a_body_that_is_too_large(self, place):
        got = place.post("completions", {"prompt": "a" * 30_000, **GREEDY})
        assert got.status_code == 413
        pieces = (b" " * 5_000 for _ in range(10))  # without a length header
        headers = {**HEADERS, "Content-Type": "application/json"}
        got = httpx.post(f"{place.url}/v1/completions", content=pieces, headers=headers)
        assert got.status_code == 413

    def test_a_queue_that_is_full(self, place):
        got = place.post("completions", {**LONG, "n": 128, "prompt": [STORY, STORY]})
        assert got.status_code == 429
        assert got.headers["retry-after"] == "1"
        assert got.json()["error"]["code"] == "queue_full"
        assert waits_until(lambda: place.serving.stats.rows + place.serving.stats.waiting == 0)


class TestEnds:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_ends_its_texts(self, place, stream):
        before = cancelled(place)
        body = {**LONG, "stream": stream, "n": 8}
        with httpx.Client(headers=HEADERS, timeout=None if stream else 0.2) as client:
            if stream:
                with client.stream("POST", f"{place.url}/v1/completions", json=body) as got:
                    next(got.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{place.url}/v1/completions", json=body)
        assert waits_until(lambda: cancelled(place) > before)
        assert waits_until(lambda: place.serving.stats.rows == 0)

    def test_a_client_that_does_not_read_holds_nobody_up(self, place):
        asked = {**LONG, "temperature": 0, "stream": True, "n": 8, "logprobs": 5, "max_tokens": 60}
        body = json.dumps(asked).encode()
        address = place.url.removeprefix("http://")
        host, port = address.split(":")
        lines = ["POST /v1/completions HTTP/1.0", f"Host: {address}"]
        lines += [f"Authorization: Bearer {KEY}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        with socket.socket() as slow, pytest.MonkeyPatch.context() as patch:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((host, int(port)))
            unsent = []
            put = http._Running._put

            def counted(self, index, piece):
                put(self, index, piece)
                unsent.append(len(self._pending))

            patch.setattr(http._Running, "_put", counted)
            slow.sendall("\r\n".join(lines).encode() + body)
            assert waits_until(lambda: place.serving.stats.rows == 8)
            got = place.client.completions.create(prompt=STORY, **GREEDY)
            assert got.choices[0].text == place.text(STORY, 24)
            # its texts end although nobody has read them
            assert waits_until(lambda: place.serving.stats.rows == 0)
            assert max(unsent) == 8
            with slow.makefile("rb") as answer:
                lines = answer.read().decode().split("\n")
        events = [line for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
        text = "".join(chunk["text"] for chunk in chunks if chunk["index"] == 7)
        assert text == place.text(STORY, 60)
        assert len(chunks) < 8 * 40  # waiting pieces were sent together

    def test_time_is_limited_and_nothing_is_told_of_a_failure(self, place):
        with running(make_app(Stub(), place.served, timeout=0.3)) as url:
            got = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a", "seed": 1})
            assert got.status_code == 500
            assert "path" not in got.text
            got = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"})
            assert got.status_code == 504
            body = {**GREEDY, "prompt": "a", "stream": True}
            assert '"code":"timeout"' in httpx.post(f"{url}/v1/completions", json=body).text
            with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                *_, last = client.responses.create(**INPUT, stream=True)
            assert (last.type, last.code, last.sequence_number) == ("error", "timeout", 2)

    def test_health_tells_of_a_thread_that_has_ended(self, place):
        serving = Serving(place.model, execution="fused", controller="fixed", draft_memory=0)
        with running(make_app(serving, place.served)) as url:
            assert httpx.get(f"{url}/health").status_code == 200
            serving.stop()
            got = httpx.get(f"{url}/health")
            assert got.status_code == 503
            assert "stopped" in got.json()["status"]

    def test_metrics(self, place):
        """In our names, and in those of vLLM, which tools read. They agree with the answer."""
        before = counted(place)
        got = place.client.completions.create(prompt=STORY * 3, **GREEDY)
        after = counted(place)
        more = {name: after[name] - before.get(name, 0) for name in after}
        told = (got.model_extra or {})["timings"]
        shown = (got.model_extra or {})["metrics"]["speculative_decoding"]
        label = '{model_name="demo-llama"}'
        drafts, drafted, accepted = (
            more[f"vllm:spec_decode_num_{name}_total{label}"]
            for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        assert 0 < drafts <= told["rounds"]
        assert (drafted, accepted) == (told["drafted"], told["accepted"])
        assert (shown["num_spec_steps"], shown["num_draft_tokens"]) == (drafts, drafted)
        histogram = shown["acceptance_histogram"]
        assert (sum(histogram), len(histogram)) == (drafts, shown["num_spec_tokens"] + 1)
        assert sum(count * number for number, count in enumerate(histogram)) == accepted
        assert shown["mean_acceptance_length"] == 1 + accepted / drafts
        per_pos = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        at = [number for name, number in more.items() if name.startswith(per_pos)]
        assert sum(at) == accepted
        assert at == sorted(at, reverse=True)
        assert at[0] <= drafts
        ours = 'layerskip_{}{{model="demo-llama"}}'
        assert more[ours.format("generated_tokens_total")] == 24
        assert more[ours.format("inter_token_seconds_count")] == 23
        assert more[ours.format("first_token_seconds_count")] == 1
        assert more[ours.format("rounds_total")] == told["rounds"]
        for name in ("kv_cache_limit_bytes", "kv_cache_bytes", "earlier_texts_bytes"):
            assert after[ours.format(name)] > 0
        asked = 'layerskip_requests_total{model="demo-llama",path="/v1/completions",status="200"}'
        assert more[asked] == 1
        assert "_created" not in metrics(place)

    def test_heads_sites_and_the_log_of_requests(self, place, capfd):
        headers = {**HEADERS, "Origin": SITE}
        for path in ("health", "v1/models", "v1/models/demo-llama", "metrics"):
            got = httpx.head(f"{place.url}/{path}", headers=headers)
            assert (got.status_code, got.content) == (200, b"")
            assert got.headers["access-control-allow-origin"] == SITE
        ask = {"Access-Control-Request-Method": "POST"}
        for origin, status in ((SITE, 200), ("https://elsewhere.org", 400)):
            got = httpx.options(f"{place.url}/v1/models", headers={"Origin": origin, **ask})
            assert got.status_code == status
        capfd.readouterr()
        serving = Stub()
        for log in (False, True):
            with running(make_app(serving, place.served), log=log) as url:
                httpx.get(f"{url}/health")
            assert ("GET /health" in capfd.readouterr().err) is log


def test_the_limit_of_a_second_model_is_that_of_requests(place):
    served, most = copy(place.served), {"max_position_embeddings": 64}
    served.max_new_tokens = 1024
    second = lively_model("llama", vocab_size=served.vocabulary, **most).float()
    serving = Serving(place.model, max_tokens=512, execution="fused", assistant=second)
    with running(make_app(serving, served)) as url:
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
        asked = {"model": "demo-llama", "prompt": STORY, "temperature": 0}
        got = httpx.post(f"{url}/v1/completions", json=asked)
        long = httpx.post(f"{url}/v1/completions", json={**asked, "max_tokens": 60})
    assert card["max_model_len"] == 64
    assert got.json()["usage"]["total_tokens"] <= 64
    assert got.json()["choices"][0]["text"]
    assert long.json()["error"]["code"] == "context_length_exceeded"


class Stub:
    """A `Serving` that accepts tasks, and then fails or never answers."""

    alive = True
    max_tokens = 512
    stats = ServingStats()

    def start(self): ...
    def stop(self): ...
    def cancel(self, text): ...
    def check_room(self, count): ...

    def submit_all(self, requests):
        if requests[0][0].seed == 1:
            raise RuntimeError("/a/path/of/this/machine")
        return [object() for _ in requests]


def counted(place):
    """The value of each metric."""
    lines = [line for line in metrics(place).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def metrics(place):
    return httpx.get(f"{place.url}/metrics", headers=HEADERS).text


def cancelled(place):
    return counted(place).get('layerskip_texts_total{model="demo-llama",reason="cancelled"}', 0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "192.0.2.1"], "cannot listen at --host 192.0.2.1 --port 8000"),
        (["--api-key", " "], "--api-key is empty"),
        (["--lora", "mine=nowhere"], "--lora must be NAME=FOLDER with an adapter_config.json"),
        (["--port", "0", "no-such-folder/a/b"], "no-such-folder/a/b"),
        (["--port", "0", "--tool-parser", "x", "no/such/folder"], "--tool-parser must be auto"),
    ],
)
def test_bad_flags_are_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main.app(["serve", *flags], prog_name="layerskip")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert words in lines[-1]


def test_a_blank_line_is_no_key(monkeypatch):
    monkeypatch.setenv("LAYERSKIP_API_KEY", "one\n \n")
    assert "--api-key is empty" in refused("serve", "demo-llama")


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens, **_):
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_characters_are_never_split(size):
    text = "naïve 漢字 👩‍👩‍👧 end"
    data, decoder = list(text.encode()), Detokenizer(Bytes())
    told = [decoder.put(data[i : i + size]) for i in range(0, len(data), size)]
    assert "\ufffd" not in "".join(told)
    assert "".join(told) + decoder.end() == text


def test_bytes_of_tokens_where_bytes_are_the_last_resort():
    words = ["▁", "▁a", "a", "\ufffd", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {word: number for number, word in enumerate(words)}
    fast = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(left=1),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast)
    text = "a a \ufffd\U0001f98a"
    ids = tokenizer(text)["input_ids"]
    assert b"".join(token_bytes(tokenizer, id_) for id_ in ids) == f" {text}".encode()
    assert token_bytes(tokenizer, 999) == b""


def test_a_stop_string_of_the_prompt_does_not_count():
    prompt, stop = b"the end", StopStrings(Bytes(), ["end", "é!"], 7)
    assert not stop(0, torch.tensor([list(prompt)]))
    assert not stop(0, torch.tensor([list(prompt + b" e")]))
    assert stop(0, torch.tensor([list(prompt + b" an end")]))
    assert stop(0, torch.tensor([list(prompt + b"x" * 50 + "é!".encode())]))
