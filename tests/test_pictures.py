"""Pictures in commands and in the server: the text of `transformers` with its processor."""

import base64
import io
import json
from functools import partial

import httpx
import openai
import pytest
import torch
from checkpoints import tiny_tokenizer
from commands import document, refused, run
from marks import thorough
from pictured import LARGE, PLACEHOLDER, conditional
from PIL import Image
from servers import running
from talks import drain
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from layerskip import Session, SkipConfig, load
from layerskip.decoding import places
from layerskip.serving import scheduler
from layerskip.serving.fields import ChatRequest
from layerskip.serving.http import make_app
from layerskip.serving.openai_api import Served, answer_of
from layerskip.serving.scheduler import Serving
from layerskip.texts import pictures
from layerskip.texts.pictures import with_pictures

TEMPLATE = (
    "{% for m in messages %}w9 {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARK {% else %}{{ p.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}w10"
)
DRAFTS = {"controller": "fixed", "max_draft_length": 3, "skip": SkipConfig.early_exit(4)}
NEW = 14


def picture(seed, size=(9, 12)):
    """A picture of noise, or of four coloured squares if the seed is even."""
    shape = (*size, 3) if seed % 2 else (2, 2, 3)
    colours = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(colours.to(torch.uint8).numpy()).resize(size[::-1], Image.NEAREST)


def png(image):
    """A picture as a PNG file."""
    held = io.BytesIO()
    image.save(held, "PNG", exif=image.getexif())
    return held.getvalue()


def url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def save_seeing(folder, kind="gemma3", size=4):
    """Write a tiny model that sees pictures, with its processor."""
    conditional(kind, size).save_pretrained(folder)
    special = {"boi_token": "w90", "eoi_token": "w91", "image_token": f"w{PLACEHOLDER}"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, extra_special_tokens=special
    )
    side = 4 * int(size**0.5)
    if kind == "gemma3":
        eyes = Gemma3ImageProcessorPil(size={"height": side, "width": side})
        processor = Gemma3Processor(eyes, tokenizer, image_seq_length=size)
    else:
        eyes = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=side)
        how = {"patch_size": 4, "num_additional_image_tokens": 1}
        how["vision_feature_select_strategy"] = "default"
        processor = LlavaProcessor(eyes, tokenizer, **how)
    processor.chat_template = TEMPLATE.replace("MARK", "w90" if kind == "gemma3" else "w96")
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["gemma3", *thorough("llava")])
def folder(request, tmp_path_factory):
    return save_seeing(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(str(folder))


def expected(loaded, messages, new=NEW):
    """The library's own text for a conversation with PIL pictures."""
    inputs = loaded.processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    inputs = inputs.to(dtype=loaded.model.dtype)
    out = loaded.model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return loaded.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def user(text, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def asked(text, *images):
    """`user` in the form that clients send."""
    parts = [{"type": "image_url", "image_url": {"url": url(png(image))}} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def answers(loaded, serving, *conversations):
    """A server's answers to conversations that arrive at the same time."""
    served = Served(loaded, "sees", context=200)
    how = {"model": "sees", "temperature": 0, "max_tokens": NEW}
    told = [answer_of(ChatRequest(messages=each, **how), served) for each in conversations]
    for answer in told:
        serving.submit(answer.choices[0].task, partial(answer.add, 0))
    drain(serving)
    return told


def texts(told):
    return [each.whole()["choices"][0]["message"]["content"] for each in told]


class TestServer:
    @pytest.mark.parametrize("enabled", [True, False])
    def test_texts_are_those_of_the_library(self, loaded, enabled, monkeypatch):
        """One picture, two pictures and none, in one batch. No pass ends inside a picture."""
        monkeypatch.setattr(scheduler, "PIECE", 3)
        first, second = picture(1), picture(2)
        talks = [
            [("w5 w7", first)],
            [("w5 w7", second)],
            [("w3 w4 w5 w6", first, second)],
            [("w5 w7",)],
        ]
        want = [expected(loaded, [user(*turn) for turn in talk]) for talk in talks]
        assert len({*want[:3]}) == 3
        serving = Serving(loaded.model, enabled=enabled, **DRAFTS)
        told = answers(loaded, serving, *([asked(*turn) for turn in talk] for talk in talks))
        assert texts(told) == want
        assert (sum(each.choices[0].counts.drafted for each in told) > 0) is enabled

    def test_a_next_turn_knows_the_picture(self, loaded):
        """Keys of one picture are never used for another picture."""
        serving = Serving(loaded.model, **DRAFTS)
        said = texts(answers(loaded, serving, [asked("w5 w7", picture(1))]))[0]
        for seed, known in ((1, True), (2, False)):
            rest = [{"role": "assistant", "content": said}, user("w8")]
            told = answers(loaded, serving, [asked("w5 w7", picture(seed)), *rest])
            assert texts(told) == [expected(loaded, [user("w5 w7", picture(seed)), *rest])]
            assert (told[0].choices[0].counts.cached > 3) is known

    def test_over_http(self, loaded):
        served = Served(loaded, "sees", context=200)
        serving = Serving(loaded.model, **DRAFTS)
        with running(make_app(serving, served)) as address:
            how = {"model": "sees", "temperature": 0}
            talk = [asked("w5 w7", picture(1))]
            want = expected(loaded, [user("w5 w7", picture(1))])
            parts = [{"type": "input_image", "image_url": url(png(picture(1)))}]
            parts.append({"type": "input_text", "text": "w5 w7"})
            how_else = how | {"input": [{"role": "user", "content": parts}]}
            how_else["max_output_tokens"] = NEW
            with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
                got = client.chat.completions.create(messages=talk, max_tokens=NEW, **how)
                same = client.responses.create(**how_else)
                events = list(client.responses.create(**how_else, stream=True))
            assert got.choices[0].message.content == same.output_text == want
            assert events[-1].response.output_text == want
            assert same.usage.input_tokens == got.usage.prompt_tokens
            tokens = httpx.post(f"{address}/tokenize", json={"messages": talk}).json()["tokens"]
            assert tokens.count(PLACEHOLDER) == 4

    def test_a_picture_longer_than_a_piece_is_refused(self, tmp_path, monkeypatch):
        loaded = load(str(save_seeing(tmp_path, size=LARGE)))
        monkeypatch.setattr(places, "PIECE", 8)
        with pytest.raises(ValueError, match=r"a picture of 16 tokens .* reads at most 8"):
            answers(loaded, Serving(loaded.model, **DRAFTS), [asked("w5", picture(1))])


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ("https://example.org/a.png", "messages", "got 'https://example.org/a.png'; other addr"),
        ("file:///etc/passwd", "messages", "other addresses are not fetched"),
        ("data:image/png;base64,a%", "messages", "not in base64"),
        (url(b"no picture"), "messages", "not a readable picture in PNG, JPEG, WEBP, GIF"),
        (url(png(picture(1))[:90]), "messages", "not a readable picture"),
        (
            url(png(picture(1, (60, 50)))),
            "messages",
            "may have 2,000 pixels here, but this one has 50 x 60",
        ),
        ([url(png(picture(1, (30, 50))))] * 2, "messages", "may have 500 pixels here"),
        ([url(png(picture(1)))] * 17, "messages", "may have 16 pictures here, got 17"),
        ({}, "messages.0.content.0", "a part of type image_url needs image_url"),
    ],
)
def test_pictures_that_are_none_are_refused_by_name(content, param, words, seeing, monkeypatch):
    monkeypatch.setattr(pictures, "PIXELS", 2000)
    parts = [
        {"type": "image_url"} | ({"image_url": each} if each else {})
        for each in (content if isinstance(content, list) else [content])
    ]
    other = [{**part, "type": "input_image"} for part in parts]
    for path, name, said in (
        ("chat/completions", "messages", parts),
        ("responses", "input", other),
    ):
        body = {"model": "sees", name: [{"role": "user", "content": said}]}
        got = httpx.post(f"{seeing}/v1/{path}", json=body)
        assert got.status_code == 400
        error = got.json()["error"]
        assert error["param"] == param.replace("messages", name)
        assert words in error["message"]
        assert "\n" not in error["message"]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    loaded = load(str(save_seeing(tmp_path_factory.mktemp("seeing"))))
    serving = Serving(loaded.model, enabled=False)
    with running(make_app(serving, Served(loaded, "sees", context=200))) as address:
        yield address


def test_a_model_of_text_refuses_pictures(tmp_path):
    shown = tmp_path / "a.png"
    picture(1).save(shown)
    words = refused("generate", "demo-llama", "--prompt", "a", "--image", shown)
    assert words.startswith("this model (llama) takes text only; pictures need gemma3, gemma4,")
    assert "takes text only" in refused("chat", "demo-llama", "--image", shown)


class TestCommands:
    def test_generate_shows_pictures(self, folder, loaded, tmp_path):
        names = []
        for seed in (1, 2):
            names.append(tmp_path / f"{seed}.png")
            picture(seed).save(names[-1])
        flags = ("--max-new-tokens", NEW, "--json", "--controller", "fixed")
        flags += ("--exit-layer", 4, "--image", names[0], "--image", names[1])
        got = document(run("generate", folder, "--prompt", "w5 w7", *flags))
        assert got["text"] == expected(loaded, [user("w5 w7", picture(1), picture(2))])
        assert got["num_draft_tokens"] > 0
        asked = tmp_path / "asked.txt"
        asked.write_text("w5 w7\nw8\n")
        both = document(run("generate", folder, "--prompts", asked, *flags))["results"]
        assert both[0]["text"] == got["text"]
        assert both[1]["text"] == expected(loaded, [user("w8", picture(1), picture(2))])
        assert both[1]["num_known_tokens"] > 4  # the pictures are known

    def test_chat_shows_pictures(self, folder, loaded, tmp_path):
        shown, saved = tmp_path / "a.png", tmp_path / "saved.jsonl"
        picture(1).save(shown)
        how = ("chat", folder, "-n", NEW, "--draft-memory", 0, "--controller", "fixed")
        lines = ("w5 w7", "w8", "/retry", f"/save {saved}", "/image no", "/reset")
        lines += (f"/image {shown}", "w5 w7")
        result = run(*how, "--image", shown, stdin="".join(f"{line}\n" for line in lines))
        first, second, again, last = result.stdout.splitlines()
        talk = [user("w5 w7", picture(1))]
        assert first == last == expected(loaded, talk)
        talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "w8"}]
        assert second == again
        content = [{"type": "text", "text": talk[1]["content"]}]  # templates want lists
        talk[1] = {"role": "assistant", "content": content}
        assert second == expected(loaded, talk)
        messages = json.loads(saved.read_text())["messages"]
        assert [each["content"] for each in messages] == ["w5 w7", first, "w8", second]
        assert "cannot read picture no: " in result.stderr

    def test_files_of_requests_show_pictures(self, folder, loaded, tmp_path):
        body = {"messages": [asked("w5 w7", picture(1))], "max_tokens": NEW}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        given.write_text(json.dumps(line) + "\n")
        result = run("run", folder, given, "--output", out, "--no-draft")
        assert result.exit_code == 0, result.output
        row = json.loads(out.read_text())
        want = expected(loaded, [user("w5 w7", picture(1))])
        assert row["response"]["body"]["choices"][0]["message"]["content"] == want

    def test_bad_pictures_are_one_line(self, tmp_path):
        bad = tmp_path / "a.png"
        bad.write_text("no picture")
        assert refused("generate", "--prompt", "a", "--image", bad).startswith(f"picture {bad}: ")
        words = refused("chat", "--image", tmp_path / "none")
        assert words == f"cannot read picture {tmp_path / 'none'}: No such file or directory"


def test_a_session_keeps_the_keys_of_pictures(loaded):
    session = Session(loaded.model, memory=1 << 24, **DRAFTS)
    known = []
    for seed in (1, 2, 1):
        message = with_pictures({"role": "user", "content": "w5 w7"}, [picture(seed)])
        want = expected(loaded, [message])
        inputs = loaded.encode_pictures([message], [picture(seed)])
        out = session.generate(inputs, max_new_tokens=NEW, do_sample=False)
        new = out.sequences[0, inputs["input_ids"].shape[1] :]
        assert loaded.tokenizer.decode(new, skip_special_tokens=True) == want
        known.append(out.stats.num_known_tokens)
    assert known[0] == 0
    assert known[1] < 3 < known[2]  # the other picture gives no known tokens


def test_a_picture_is_turned_as_it_was_taken():
    image = picture(1, (4, 8))
    image.getexif()[0x0112] = 6  # rotated by a quarter turn
    assert pictures.read_picture(png(image)).size == (4, 8)
