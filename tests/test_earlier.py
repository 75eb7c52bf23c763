"""Drafts from earlier answers: the index, its files, whose answers they are, and what they cost."""

import json
import random
import re
from multiprocessing import get_context

import pytest
import torch
from checkpoints import CHAT, save_checkpoint, tiny_tokenizer
from commands import PROMPT, refused, run, warned
from models import VOCABULARY, lively_model, prompt
from talks import finished, said

from layerskip import DecodingOptions, LayerSkipDecoding, Session, SkipConfig, generate
from layerskip.costs.speculation import CostTable
from layerskip.decoding.sources.earlier import AnswerIndex, EarlierAnswers
from layerskip.decoding.sources.lookup import Automaton, Cursor
from layerskip.files.earlier_answers import AnswerFile
from layerskip.serving.requests import TextRequest
from layerskip.serving.scheduler import Serving

STEEP = CostTable(0.0, (1.0, 1.3, 1.6, 1.9, 2.2, 2.5, 2.8))
ONLY = {"lookup": False, "draft_memory": 0, "costs": CostTable(0.0, (1.0, 1.01, 1.02))}
NEW = 40


@pytest.fixture(scope="module")
def model():
    return lively_model("llama", num_hidden_layers=3)


def earlier_of(out):
    return next(each for each in out.stats.sources if each.name == "earlier")


# ---- The index ----


def is_in(part, text):
    return any(text[i : i + len(part)] == part for i in range(len(text) - len(part) + 1))


@pytest.mark.parametrize("alphabet", [2, 3, 8])
def test_a_cursor_stays_right_while_its_automaton_grows(alphabet):
    """What it matches occurs there, with its draft behind it."""
    drawn, matches = random.Random(alphabet), 0
    for _ in range(30):
        automaton, texts, walked = Automaton(), [], []
        cursor = Cursor(automaton)
        for _ in range(40):
            if drawn.random() < 0.3:
                texts.append([*walked[-3:], *drawn.choices(range(alphabet), k=9)])
                automaton.add(texts[-1])
            walked += drawn.choices(range(alphabet))
            cursor.extend(walked[-1:])
            found = cursor.find(4)
            stretch = [*walked[len(walked) - found.match :], *found.tokens]
            assert not found.match or any(is_in(stretch, text) for text in texts)
            matches += found.match
    assert matches > 1000


def test_the_oldest_answers_go_first():
    index = AnswerIndex(100)
    for number in range(30):
        index.add([number] * 9)
        held = [each for half in index.halves[::-1] for each in half.tokens[::10]]
        assert held == [*range(number + 1)][-len(held) :]
        assert min(number + 1, 5) <= len(held) <= 10
    index.add([*range(1000)])  # of an answer that is too long, the end
    assert index.halves[0].tokens[-41:-1] == [*range(960, 1000)]
    assert len(index) <= 100


# ---- Decoding. That texts are the target's is also tested in `test_every_kind.py`. ----


@pytest.mark.parametrize("sampled", [False, True])
def test_a_session_drafts_from_its_earlier_answers(model, sampled):
    """The last tokens of a prompt suffice to find an answer again."""
    law = {"do_sample": sampled, "seed": 3 if sampled else None, "eos_token_id": None}
    how = {"max_new_tokens": NEW, "pad_token_id": 0, **law, **ONLY}
    session = Session(model, remember="memory")
    ids = prompt(30)
    outs = [session.generate(ids, **how) for _ in range(2)]
    alone = generate(model, ids, **how)
    assert [out.sequences.tolist() for out in outs] == [alone.sequences.tolist()] * 2
    assert earlier_of(outs[0]).num_accepted_tokens < 3
    assert earlier_of(outs[1]).num_accepted_tokens > NEW / 2
    size = len(session.settings["sources"][0].of())
    assert size == 30 + NEW + 1  # of the two, one
    rounds = session.decode(prompt(9), **ONLY, max_new_tokens=NEW, eos_token_id=[])
    next(rounds)
    rounds.close()  # an abandoned text is remembered, too
    assert len(session.settings["sources"][0].of()) == size + 9 + 1 + 1
    session.forget()
    assert earlier_of(session.generate(ids, **how)).num_accepted_tokens < 3


def test_where_texts_depend_on_drafts_nothing_is_remembered(model):
    session = Session(model, acceptance="rejection", draft_memory=0, remember="memory")
    session.generate(prompt(9), max_new_tokens=9, do_sample=True, seed=1)
    assert len(session.settings["sources"][0].of()) == 0
    decoding = LayerSkipDecoding(acceptance="rejection", remember="memory")
    assert "no drafts by earlier answers: under the rejection rule" in decoding.explain(model)
    session.generate(prompt(9), max_new_tokens=9, do_sample=False)  # greedy texts do not
    assert len(session.settings["sources"][0].of()) > 0


def test_earlier_answers_are_remembered_only_where_that_was_asked_for(model):
    for settings, on in (({}, True), ({"remember": "off"}, False), ({"lookup": False}, False)):
        assert bool(Session(model, **settings).settings["sources"]) is on
    assert "earlier answers" not in LayerSkipDecoding().explain(model)
    decoding = LayerSkipDecoding(remember="memory", **ONLY)  # as long as it lives
    asked = {"max_new_tokens": NEW, "custom_generate": decoding, "return_dict_in_generate": True}
    outs = [model.generate(prompt(9), do_sample=False, **asked) for _ in range(2)]
    assert outs[0].stats.num_accepted_tokens < outs[1].stats.num_accepted_tokens


def test_2000_unlike_answers_cost_next_to_nothing(model):
    """Short matches are everywhere, and wrong; soon none is drafted, in later calls neither."""
    drawn, source = random.Random(0), EarlierAnswers()
    for _ in range(2000):
        source.of().add(drawn.choices(range(2, VOCABULARY), k=45))
    cost = tokens = 0.0
    for number in range(10):
        ids = torch.tensor([drawn.choices(range(2, VOCABULARY), k=20)])  # (1, T)
        how = {**ONLY, "sources": [source], "costs": STEEP, "seed": number}
        out = generate(model, ids, **how, max_new_tokens=NEW, do_sample=True, top_k=0)
        drafted = [round_.drafted[0] for round_ in out.rounds[1:]]
        cost += sum(STEEP.round_cost(each) for each in drafted)
        tokens += out.stats.num_new_tokens - 1
    assert cost < 1.01 * tokens + 2


# ---- Servers ----


@pytest.mark.parametrize("where", ["memory", "shared"])
def test_owners_draft_from_their_own_answers(model, where):
    serving = Serving(model, max_rows=1, **ONLY, remember=where)
    accepted, texts = [], []
    for owner in ("ann", "ann", "bob"):
        told = finished(serving, TextRequest(prompt(9)[0].tolist(), NEW, owner=owner))
        texts.append(said(told))
        accepted.append(told[-1].counts.accepted)
    assert texts == texts[:1] * 3
    assert accepted[0] < 3
    assert accepted[1] > NEW / 2
    assert accepted[2] == accepted[1 if where == "shared" else 0]
    assert serving.stats.drafts_used > 0


# ---- Files ----


def file_in(folder, tokenizer="a", most=1000):
    return AnswerFile(folder, tokenizer, VOCABULARY, most)


def test_a_file_keeps_the_newest_answers(tmp_path):
    file = file_in(tmp_path / "new")
    assert file.read() == []
    for number in range(30):
        file.add([number] * 90)
        assert file.read() == [[each] * 90 for each in range(max(0, number - 10), number + 1)]
    assert (tmp_path / "new" / "answers.jsonl").stat().st_mode & 0o777 == 0o600
    file.clear()
    assert file.read() == []


def add_some(folder, number):
    for _ in range(40):
        file_in(folder, most=3000).add([number] * 50)


@pytest.mark.thorough
def test_two_processes_add_to_one_file(tmp_path):
    context = get_context("spawn")
    both = [context.Process(target=add_some, args=(tmp_path, number)) for number in (1, 2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
        assert each.exitcode == 0
    kept = file_in(tmp_path, most=3000).read()
    assert len(kept) == 60
    assert all(each in ([1] * 50, [2] * 50) for each in kept)


HEADER = {"schema": 1, "tokenizer": "a"}
DAMAGED = {
    b"[5,6\n": "line 2: not valid JSON",
    b"[5,97]\n": "line 2: 97 is no token id of the model",
    b"{}\n": "line 2: an answer must be a list",
    b"[5,6": "line 2: not valid JSON",
}


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path, line):
    (tmp_path / "answers.jsonl").write_bytes(json.dumps(HEADER).encode() + b"\n" + line)
    with pytest.raises(ValueError, match=DAMAGED[line]):
        file_in(tmp_path).read()


def test_another_tokenizer_is_refused(tmp_path):
    file_in(tmp_path).add([5])
    other = file_in(tmp_path, "b")
    for use in (other.read, lambda: other.add([6])):
        with pytest.raises(ValueError, match="holds token ids of another tokenizer"):
            use()
    assert file_in(tmp_path).read() == [[5]]


def test_answers_go_on_where_they_can_no_longer_be_kept(tmp_path):
    index = AnswerIndex(1000, file_in(tmp_path))
    (tmp_path / "answers.jsonl").mkdir()
    with pytest.warns(UserWarning, match="answers are no longer kept on disk"):
        index.add([1, 2, 3])
    index.add([4, 5, 6])
    assert index.halves[0].tokens[-4:-1] == [4, 5, 6]


# ---- Commands ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("earlier"), template=CHAT)


def test_chats_remember_from_day_to_day(folder, tmp_path):
    flags = ("-n", 20, "--threads", 1, "--draft-memory", 0, "--remember", tmp_path / "kept")
    first, *later = [
        run("chat", folder, *flags, stdin=f"w5 w7\n/draft\n{end}") for end in ("", "", "/forget\n")
    ]
    answers = {each.stdout.splitlines()[0] for each in (first, *later)}
    assert len(answers) == 1
    accepted = [int(re.search(r"accepted (\d+)", each.stdout)[1]) for each in (first, *later)]
    assert accepted[0] < 5
    assert accepted[1] == accepted[2] > 10
    assert "earlier answers are forgotten" in later[-1].stderr
    assert not (tmp_path / "kept" / "answers.jsonl").exists()


def test_a_run_learns_from_its_rows(folder, tmp_path):
    lines = "".join(f"{PROMPT}\n" for _ in range(4))
    (tmp_path / "in.txt").write_text(lines)
    rows = {}
    for where in ("memory", "off"):
        output = tmp_path / f"{where}.jsonl"
        how = ("-n", 20, "--max-rows", 1, "--draft-memory", 0, "--remember", where)
        assert run("run", folder, tmp_path / "in.txt", "--output", output, *how).exit_code == 0
        rows[where] = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["text"] for where in rows for row in rows[where]}) == 1
    accepted = {where: [row["accepted"] for row in rows[where]] for where in rows}
    assert accepted["memory"][-1] > accepted["memory"][0] == accepted["off"][-1]


def test_wrong_folders_end_a_command_in_one_line(folder, tmp_path):
    ask = ("generate", folder, "--prompt", PROMPT, "--remember", tmp_path)
    assert "greater than or equal to 100, got '99'" in refused(*ask, "--remember-tokens", 99)
    (tmp_path / "answers.jsonl").write_text('{"schema": 2}\n')
    assert "schema must be 1, got 2" in refused(*ask)
    (tmp_path / "answers.jsonl").write_text(json.dumps(HEADER) + "\n")
    assert "token ids of another tokenizer; give another --remember folder" in refused(*ask)
    (tmp_path / "file").touch()
    ask = ("generate", folder, "--prompt", PROMPT, "--remember", tmp_path / "file")
    assert "cannot write to" in refused(*ask)
    assert "no effect with --no-draft" in warned(run(*ask, "--no-draft", "-n", 2))[0]


def test_no_file_decides_where_answers_are_written(model, tmp_path):
    for where in ("off", "memory"):
        skip = SkipConfig(exit_layer=2, decoding=DecodingOptions(remember=where))
        assert LayerSkipDecoding(skip).remember == where
    skip = SkipConfig(exit_layer=2, decoding=DecodingOptions(remember="/tmp/elsewhere"))
    with pytest.raises(ValueError, match="a skip config may set remember to off or memory"):
        LayerSkipDecoding(skip)
    with pytest.raises(ValueError, match="needs the tokenizer; pass tokenizer="):
        Session(model, remember=str(tmp_path))
    Session(model, remember=str(tmp_path), tokenizer=tiny_tokenizer())
