"""Grammars: what they allow. Drafts neither leave them nor disturb their state."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import document, refused, run
from models import Counting, Erratic, Fickle, lively_model, prompt, pure, scripted
from transformers import AutoTokenizer, LogitsProcessor

import layerskip
from layerskip import Lookup, SkipConfig, decode, generate
from layerskip.decoding.laws import Law, Stateful
from layerskip.decoding.noise import gumbel_noise, stream_key
from layerskip.decoding.sources import forced
from layerskip.decoding.sources.lookup import NOTHING
from layerskip.texts import grammars

EOS, PADDED = 0, 2060  # the vocabulary has 2048 tokens
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
DRAFTS = {
    "plain": {"enabled": False},
    "forced": {"lookup": False, "draft_memory": 0, "controller": "fixed"},
    "lookup": {"lookup": True, "draft_memory": 0, "controller": "fixed"},
    "skip": {"skip": SkipConfig(attention=(3,), mlp=(4,)), "controller": "fixed"},
    "skip, lookup": {
        "skip": SkipConfig(attention=(3,), mlp=(4,)),
        "lookup": True,
        "controller": Erratic(),
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(layerskip.__file__).parent / "models" / "demo-llama")


@pytest.fixture(scope="module")
def model():
    made = lively_model("llama", vocab_size=PADDED, eos_token_id=EOS, pad_token_id=1)
    made.generation_config.eos_token_id = EOS
    return made


class Replayed(LogitsProcessor):
    """llguidance without state: it reads every row's whole text each time."""

    layerskip_pure = True

    def __init__(self, grammar, width):
        self.matcher, self.width = grammar.compiled, width

    def __call__(self, ids, scores):
        out = torch.full_like(scores, -float("inf"))
        for row, old, new in zip(ids[:, self.width :].tolist(), scores, out, strict=True):
            if EOS in row:
                new[EOS] = 0.0
                continue
            matcher = self.matcher.deep_copy()
            assert matcher.try_consume_tokens(row) == len(row)
            allowed = torch.tensor([*matcher.compute_logit_bias()]) > 0  # (V,)
            new[: len(allowed)] = old[: len(allowed)].masked_fill(~allowed, -float("inf"))
        return out


def texts(out, tokenizer, width):
    found = tokenizer.batch_decode(out.sequences[:, width:], skip_special_tokens=True)
    return found


def check_person(text):
    person = json.loads(text)
    assert person.keys() == SCHEMA["properties"].keys()
    assert len(person["name"]) <= 6
    assert person["age"] in range(100)
    assert len(person["colours"]) <= 2
    assert {*person["colours"]} <= {"red", "blue"}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("sample", [False, True])
def test_drafts_stay_in_the_grammar(drafts, sample, model, tokenizer):
    """The text equals that of a stateless processor, and if greedy, that of the library."""
    ids = prompt(9, rows=3)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    ids = ids * mask + (1 - mask)
    grammar = grammars.json_schema(SCHEMA, tokenizer)
    replayed = Replayed(grammar, ids.shape[1])
    how = {"max_new_tokens": 60, "do_sample": sample}
    given = {"input_ids": ids, "attention_mask": mask}
    want = generate(model, given, enabled=False, seed=5, logits_processor=[replayed], **how)
    if not sample:
        library = model.generate(**given, **how, logits_processor=[replayed])
        assert want.sequences.tolist() == library.tolist()
    how |= {"seed": 5, "logits_processor": [grammar], **DRAFTS[drafts]}
    got = generate(model, given, **how)
    assert got.sequences.tolist() == want.sequences.tolist()
    if drafts != "plain":
        first = got.stats.sources[0]
        assert first.num_accepted_tokens == first.num_draft_tokens > 0
    again = generate(model, given, **how)  # the grammar keeps no state of the first call
    assert again.sequences.tolist() == want.sequences.tolist()


def test_texts_are_json_of_the_schema(model, tokenizer):
    grammar = grammars.json_schema(json.dumps(SCHEMA), tokenizer, eos=[EOS])
    ids = prompt(5, rows=4)
    found = set()
    for acceptance in ("coupled", "rejection"):
        for seed in range(3):
            out = generate(
                model,
                {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                **{"do_sample": True, "seed": seed, "max_new_tokens": 80},
                **{"acceptance": acceptance, "logits_processor": [grammar]},
                **DRAFTS["skip, lookup"],
            )
            own = texts(out, tokenizer, 5)
            assert (out.sequences[:, 5:] == EOS).any(1).all()
            for text in own:
                check_person(text)
            found |= {*own}
            first = out.stats.sources[0]
            assert first.num_accepted_tokens == first.num_draft_tokens > 0
    assert len(found) > 20


def test_a_processor_that_forgets_to_roll_back_is_seen(model, tokenizer, monkeypatch):
    """Negative control: drafts spoil the state of a grammar that ignores `rollback`."""
    grammar = grammars.json_schema(SCHEMA, tokenizer)

    class Forgetful(type(grammar)):
        def rollback(self, count):
            pass

    forgetful = Forgetful(grammar.compiled, grammar.eos, tokenizer)
    # otherwise the forced tokens of the broken grammar would keep the others from drafting
    monkeypatch.setattr(forced.ForcedRow, "find", lambda self, longest: NOTHING)
    ids = prompt(9)
    how = {"max_new_tokens": 60, "do_sample": True, "seed": 5}
    want = generate(model, ids, enabled=False, logits_processor=[grammar], **how)
    drafts = DRAFTS["skip"]
    good = generate(model, ids, logits_processor=[grammar], **how, **drafts)
    assert good.sequences.tolist() == want.sequences.tolist()
    bad = generate(model, ids, logits_processor=[forgetful], **how, **drafts)
    assert bad.sequences.tolist() != want.sequences.tolist()


def test_a_text_ends_where_its_grammar_may(tokenizer):
    grammar = grammars.regex("ab?|abcd", tokenizer, eos=[EOS, 1])
    assert isinstance(grammar, Stateful)
    scores = torch.zeros(PADDED)

    def allowed(state):
        tokens = (state.mask(scores) > -float("inf")).nonzero()[:, 0].tolist()
        return {"end" if token in (EOS, 1) else tokenizer.decode([token]) for token in tokens}

    (a,), (b,) = (tokenizer.encode(each, add_special_tokens=False) for each in "ab")
    state = grammar.start()
    assert "end" not in allowed(state)
    assert "a" in allowed(state)
    state.advance(a)
    behind_a = allowed(state)
    assert {"end", "b"} <= behind_a
    state.advance(b)
    assert {"end", "c"} <= allowed(state) <= {"end", "c", "cd"}
    for token in (EOS, 7, a):  # an end, and tokens that cannot follow it
        state.advance(token)
        assert allowed(state) == {"end"}
    state.rollback(4)
    assert allowed(state) == behind_a
    state.advance(a)  # a token that is not allowed
    assert allowed(state) == {"end"}
    state.rollback(2)
    assert allowed(state) == allowed(grammar) == allowed(grammar.start())
    assert len(grammar.mask(torch.zeros(50))) == 50  # fewer than the tokenizer's


def test_forced_tokens_spell_what_must_follow(tokenizer):
    state = grammars.regex("(yes|no), indeed [0-9]", tokenizer).start()
    assert state.forced() == []
    for token in tokenizer.encode("yes", add_special_tokens=False):
        state.advance(token)
    forced = tokenizer.decode(state.forced())
    assert len(forced) > 5
    assert ", indeed ".startswith(forced)
    state.advance(EOS)
    assert state.forced() == []


@pytest.mark.parametrize("sample", [False, True])
def test_the_same_processor_serves_the_librarys_own_generate(sample, model, tokenizer):
    """In float64, sampled with our noise; one object serves several calls."""
    grammar = grammars.json_schema(SCHEMA, tokenizer)

    def noisy(ids, scores):
        keys = [stream_key(seed) for seed in range(len(ids))]
        noise = gumbel_noise(keys, [ids.shape[1]] * len(ids), scores.shape[1])  # (B, V)
        return scores + noise.masked_fill(scores == -float("inf"), 0.0)

    drawn = [noisy] if sample else []
    for ids in (prompt(9, rows=2), prompt(10)):
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        how = {"max_new_tokens": 40}
        processors = [grammar, *drawn]
        want = model.generate(**given, **how, do_sample=False, logits_processor=processors)
        how |= {"do_sample": sample, "seeds": range(len(ids)), "top_k": 0}
        got = generate(model, given, **how, logits_processor=[grammar], **DRAFTS["skip, lookup"])
        assert got.sequences.tolist() == want.tolist()
        assert (want[:, ids.shape[1] :] != want[0, -1]).any()


def test_rows_out_of_step_are_refused(model, tokenizer):
    grammar = grammars.json_schema(SCHEMA, tokenizer)
    ids = prompt(9, rows=2)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(ValueError, match=r"all rows grow by one token.*grammar\.start\(\)"):
        model.generate(**given, max_new_tokens=20, num_beams=3, logits_processor=[grammar])
    refused, scores = pytest.raises(ValueError, match="leave out beams"), torch.zeros(2, PADDED)
    fresh, alike = grammar.start(), ids[:1].expand(2, -1)
    first = fresh(alike, scores)
    assert fresh(alike, scores).equal(first)  # the same prompt starts again
    with refused:
        fresh(torch.cat([alike, alike[:, :2]], 1), scores)  # two tokens at once
    quote, brace = (tokenizer.encode(each, add_special_tokens=False)[0] for each in ('"', "{"))
    two = torch.cat([alike, torch.tensor([[quote], [brace]])], 1)
    fresh(two, scores)
    with refused:
        fresh(torch.cat([two.flip(0), alike[:, :1]], 1), scores)  # rows in another order
    assert fresh(prompt(5, rows=2), scores).equal(first)  # another prompt


def fits(grammar, text):
    """Whether a grammar allows a whole text."""
    state = grammar.start()
    for token in grammar.tokenizer.encode(text, add_special_tokens=False):
        if state.mask(torch.zeros(PADDED))[token] < 0:
            return False
        state.advance(token)
    return bool(state.mask(torch.zeros(PADDED))[EOS] == 0)


@pytest.mark.parametrize(
    ("pattern", "fitting", "other"),
    [
        (r"\d{3}-\d{4}", "555-1234", "٣٣٣-٣٣٣٣"),
        (r"[\d.]+", "1.5", "٣"),
        (r"\D\W", "é!", "5a"),
        (r"\w+\s", "a_1 ", "é "),
        (r"\\d", r"\d", "5"),
        (r"(?u)\d", "٣", "a"),
    ],
)
def test_classes_are_of_ascii_unless_asked(pattern, fitting, other, tokenizer):
    grammar = grammars.regex(pattern, tokenizer)
    assert fits(grammar, fitting)
    assert not fits(grammar, other)


def test_no_property_is_given_twice(tokenizer):
    """A schema that does not mention additional properties allows none; otherwise it decides."""
    listed = {"type": "object", "properties": {"a": {"const": {"properties": {}}}}}
    closed = grammars.json_schema(listed, tokenizer)
    assert fits(closed, '{"a": {"properties": {}}}')
    assert not fits(closed, '{"b": 1}')
    named = {"properties": {"properties": listed, "default": listed}}  # names that are keywords
    assert fits(grammars.json_schema(named, tokenizer), '{"properties": {}, "default": {}}')
    assert not fits(grammars.json_schema(named, tokenizer), '{"default": {"b": 1}}')
    for more in ({"additionalProperties": True}, {"required": ["b"]}):
        assert fits(grammars.json_schema(listed | more, tokenizer), '{"b": 1}')
    parts = [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 2}}}]
    assert fits(grammars.json_schema({"allOf": parts}, tokenizer), '{"a": 1, "b": 2}')


def test_a_text_that_needs_too_much_of_its_grammar(tokenizer):
    schema = {"type": "string", "pattern": "(.*[aeiou].{2000}b.*){2000}"}
    state = grammars.json_schema(schema, tokenizer).start()
    for token in tokenizer.encode('"' + "bead" * 50, add_special_tokens=False):
        state.advance(token)
    with pytest.raises(grammars.GrammarLimit, match=r"too many expressions.*; simplify it"):
        state.mask(torch.zeros(PADDED))


@pytest.mark.parametrize("mark", ["</think>", "<|pad|>"])  # spelled, and one token
def test_text_is_free_up_to_a_mark(mark, tokenizer):
    grammar = grammars.json_schema({"type": "object"}, tokenizer, after=mark)
    for text in (f'a {{"\n{mark}\n\n{{}}', f'{mark}{{"a": 1}}'):
        assert fits(grammar, text)
    for text in ("{}", mark, f"{mark}\n\n\n{{}}", f"a{mark}b{mark}{{}}"):
        assert not fits(grammar, text)


def test_a_mark_inside_a_draft(model, tokenizer):
    """What is drafted behind it obeys the grammar."""
    ids, grammar = prompt(9), grammars.json_schema({}, tokenizer, after="</think>")
    text, wrong = (tokenizer.encode(f"so</think>{end}") for end in ('{"a": 1}', "no {}"))
    how = {"logits_processor": [grammar, scripted([*text, EOS], 9)], "max_draft_length": 24}
    how |= {"draft_memory": 0, "controller": "fixed", "max_new_tokens": 30}
    for drafted, rounds in ((text, 2), (wrong, 9)):
        known = Lookup([[*ids[0, -4:].tolist(), *drafted]])
        out = generate(model, ids, lookup=known, **how)
        assert out.sequences[0, 9:].tolist() == [*text, EOS]
        assert out.stats.acceptance_rate == 1
        assert out.stats.num_rounds < rounds


def test_formats_that_are_not_known_are_annotations(tokenizer):
    properties = {"format": {"type": "string", "format": "phone"}, "day": {"format": "date"}}
    schema = {"properties": properties, "required": ["format", "day"], "type": "object"}
    for asked in (schema, {"allOf": [schema]}):
        grammar = grammars.json_schema(asked, tokenizer)
        assert fits(grammar, '{"format": "none", "day": "2026-11-28"}')
        assert not fits(grammar, '{"format": "none", "day": "today"}')
    assert properties["format"]["format"] == "phone"


def test_whitespace_between_tokens_of_json(tokenizer):
    for whitespace in (False, True):
        state = grammars.json_schema(SCHEMA, tokenizer, whitespace=whitespace).start()
        for token in tokenizer.encode('{"name": "a",  "age"', add_special_tokens=False):
            state.advance(token)
        ended = (state.mask(torch.zeros(PADDED)) > -float("inf")).nonzero().flatten().tolist()
        assert (ended == [EOS]) is not whitespace


def test_a_processor_of_a_users_own(model):
    """All of its tokens are forced, so each round drafts as many as it may and adds one."""
    counting = Counting()
    out = generate(
        model,
        prompt(5),
        **{"max_new_tokens": 40, "do_sample": False, "logits_processor": [counting]},
        **{"lookup": False, "draft_memory": 0, "controller": "fixed", "max_draft_length": 12},
    )
    assert out.sequences[0, 5:].tolist() == [20 + i % 7 for i in range(40)]
    assert out.stats.acceptance_rate == 1
    assert out.stats.num_rounds == 3
    assert counting.text == []
    far = Lookup([[20 + i % 7 for i in range(10)] + [3, 4, 5]])  # its end is forbidden
    looked = list(
        decode(
            model,
            prompt(5),
            max_new_tokens=40,
            logits_processor=[counting],
            lookup=far,
            draft_memory=0,
            controller=Fickle(1),
            max_draft_length=3,
        )
    )
    assert [t for r in looked for t in r.tokens[0]] == [20 + i % 7 for i in range(40)]
    assert all(r.drafted == r.accepted for r in looked)
    assert any(r.source_of(0) == 1 for r in looked)


def test_every_row_and_law_has_a_state_of_its_own():
    history = torch.arange(24).reshape(2, 12)
    for law in (Law([Counting()], do_sample=False, rows=2) for _ in range(2)):
        for lengths in ([5, 9], [9, 5], [4, 12], [7, 4]):
            scores = law.scores(torch.zeros(2, 30), history, [0, 1], lengths, 4)
            assert scores.argmax(-1).tolist() == [20 + (n - 4) % 7 for n in lengths]
        known = [text.tokens for text in law._texts.values()]
        assert known == [[4, 5, 6], []]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: grammars.json_schema("{", t), "must be JSON"),
        (lambda t: grammars.json_schema("[]", t), "must be an object"),
        (lambda t: grammars.json_schema({"type": "nothing"}, t), "llguidance refuses"),
        (lambda t: grammars.regex("(", t), "unclosed group"),
        (lambda t: grammars.json_schema({"$ref": "#"}, t), "form a cycle: #"),
        (
            lambda t: grammars.json_schema(
                {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"$ref": "#/properties/a"}}},
                t,
            ),
            "form a cycle",
        ),
        (lambda t: grammars.json_schema({"anyOf": [{"$ref": "#"}]}, t), "nothing fits it"),
        (lambda t: grammars.regex("a", t, eos=[]), "needs a token that ends a text"),
        (lambda t: grammars.json_schema({"multipleOf": 10**6}, t), "must be at most 100000"),
        (lambda t: grammars.lark("start: a\na: b", t), 'unknown name: "b"$'),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(call, message, tokenizer):
    with pytest.raises(ValueError, match=message) as caught:
        call(tokenizer)
    assert "\n" not in str(caught.value)


def test_a_pure_processor_beside_a_grammar(model, tokenizer):
    @pure
    def no_blue(ids, scores):
        return scores.index_fill(1, torch.tensor(blue), -float("inf"))

    blue = [t for t in range(2048) if tokenizer.decode([t]).startswith("b")]
    grammar = grammars.regex("(red |blue ){3}", tokenizer)
    ids = prompt(5)
    for drafts in DRAFTS.values():
        how = {"max_new_tokens": 20, "do_sample": True, "logits_processor": [no_blue, grammar]}
        out = generate(model, ids, seed=0, **how, **drafts)
        assert texts(out, tokenizer, 5) == ["red red red "]


def test_the_command_line_keeps_texts_to_grammars(tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    sampled = ("--do-sample", "--seed", 3, "--json")
    ask = ("generate", "demo-llama", "--prompt", "def f(", "--max-new-tokens", 80)
    found = document(run(*ask, "--json-schema", schema, *sampled))
    check_person(found["text"])
    assert found["finish_reason"] == "stop"
    forced = found["sources"][0]
    assert forced["name"] == "forced"
    assert forced["num_accepted_tokens"] == forced["num_draft_tokens"] > 0
    plain = document(run(*ask, "--json-schema", schema, *sampled, "--no-draft"))
    assert plain["text"] == found["text"]
    assert re.fullmatch("(yes|no)!", document(run(*ask, "--regex", "(yes|no)!", "--json"))["text"])
    for flags, message in (
        (("--json-schema", schema, "--regex", "a"), "give --json-schema or --regex, not both"),
        (("--json-schema", tmp_path), "cannot read --json-schema"),
        (("--regex", "("), "llguidance refuses the grammar"),
    ):
        assert message in refused(*ask, *flags)
