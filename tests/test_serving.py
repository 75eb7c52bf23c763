"""A batch that rows join and leave: every text is the one it has alone, whoever is beside it."""

import gc
import random
import resource
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch
from kinds import BLOCKS, weights_of
from marks import slow, thorough
from models import VOCABULARY, Counting, Fickle, Growing, lively_model, near, pure
from official import assistant_of, target_of
from small import small_model
from talks import alone, drain, finished, said, together
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from layerskip import LogitLookup, Lookup, Proposal, SkipConfig, Source, State, decode, load
from layerskip.backends.captured import Captured, _pass
from layerskip.backends.fused import Fused
from layerskip.decoding.laws import Law
from layerskip.decoding.passes import Passes
from layerskip.serving import scheduler
from layerskip.serving.requests import Piece, Refusal, TextRequest
from layerskip.serving.scheduler import Serving
from layerskip.timing import cost_tables

SETTINGS = {"skip": SkipConfig.early_exit(2), "execution": "fused"}
CAPTURED = {"execution": "captured", "memory": 1 << 22}  # whose buffers have at least 257 slots
STARTS = [[], [5, 6, 7, 8, 9], [5, 6, 7, 8, 30, 31]]


def texts_alone(model, serving, tasks):
    """Decode tasks in one batch; each must have the text that it has alone."""
    told = together(serving, tasks)
    assert [*map(said, told)] == [alone(model, task) for task in tasks]
    return told


def any_task(draw, starts):
    begun = list(draw.choice(starts))
    prompt = begun + [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, 9))]
    sampled = draw.random() < 0.5
    penalty = [RepetitionPenaltyLogitsProcessor(1.3)] if draw.random() < 0.3 else []
    return TextRequest(
        prompt,
        max_new_tokens=draw.randint(1, 14),
        do_sample=sampled,
        temperature=draw.choice([0.7, 1.0]) if sampled else None,
        top_k=draw.choice([0, 20]) if sampled else None,
        seed=draw.randrange(1000),
        eos=frozenset(draw.sample(range(VOCABULARY), draw.randint(0, 4))),
        processors=penalty,
        top_logprobs=draw.choice([None, 2]),
    )


def schedule(model, seed, starts=STARTS, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "PIECE", random.Random(-seed).choice([3, 12, 512]))
        _schedule(model, seed, SETTINGS | settings, starts)


def laws_looked_up(seed):
    """For two schedules in five: drafts from a text's laws, perhaps also lookups."""
    draw = random.Random(f"laws {seed}")
    if draw.random() < 0.6:
        return []
    return [LogitLookup(draw.randint(1, 3), draw.choice([None, Lookup()]))]


def _schedule(model, seed, settings, starts):
    draw = random.Random(seed)
    memory = draw.choice([70_000, 200_000, 1 << 22])
    draws_laws = settings.get("skip") and "sources" not in settings
    serving = Serving(
        model,
        max_rows=draw.randint(1, 5),
        session_memory=draw.choice([0, 100_000]),
        max_draft_length=4,
        controller=draw.choice([Fickle, Growing])(seed),
        **{
            "memory": memory,
            "remember": draw.choice(["off", "memory", "shared"]),
            "sources": laws_looked_up(seed) if draws_laws else [],
            **settings,
        },
    )
    tasks, pieces, cancelled = [], [], []
    tickets = []
    left = draw.randint(2, 5)
    while serving.step() or left:
        if left and draw.random() < 0.5:
            left -= 1
            task = any_task(draw, starts)
            expected = alone(model, task, settings["execution"])
            if draw.random() < 0.5:
                predicted = list(expected)
                if draw.random() < 0.5:
                    predicted[len(predicted) // 2] = draw.randrange(VOCABULARY)
                task = TextRequest(**{**vars(task), "predicted": predicted})
            tasks.append((task, expected))
            told = []
            pieces.append(told)
            tickets.append(serving.submit(task, told.append))
        if tickets and draw.random() < 0.05:
            number = draw.randrange(len(tickets))
            cancelled.append(number)
            serving.cancel(tickets[number])
        stats = serving.stats
        assert stats.used <= stats.memory
        assert stats.known_used <= serving._cached.memory
    for number, ((task, expected), told) in enumerate(zip(tasks, pieces, strict=True)):
        text = said(told)
        assert [piece.reason for piece in told[:-1]] == [None] * (len(told) - 1)
        last = told[-1]
        if last.reason == "cancelled":
            assert number in cancelled
            assert text == expected[: len(text)]
            continue
        assert last.error is None
        assert text == expected
        assert last.reason == ("stop" if text[-1] in (task.eos or ()) else "length")
        assert last.counts.accepted <= last.counts.drafted
        assert task.predicted or not last.counts.predicted
        if task.top_logprobs is not None:
            assert sum(len(piece.logprobs) for piece in told) == len(text)
    assert serving.stats.rows == serving.stats.waiting == 0


@pytest.fixture(scope="module")
def model():
    return lively_model("llama", num_hidden_layers=3)


BLOCKS_OF_SEEDS = [(first, first + 5) for first in range(0, 40, 5)]
BLOCKS_OF_SEEDS += slow(*((first, first + 248) for first in range(40, 5000, 248)))


@pytest.mark.parametrize(("first", "last"), BLOCKS_OF_SEEDS)
def test_texts_of_random_schedules_are_their_lone_texts(model, first, last):
    for seed in range(first, last):
        schedule(model, seed, **(CAPTURED if seed % 2 else {}))


def test_passes_of_fewer_texts_than_before_are_captured(model, monkeypatch):
    """Buffers then have more rows than there are texts; eight numbers of rows take few captures."""
    run, outside, rows = Fused.run, [], set()

    def spy(self, hidden, step, blocks):
        if isinstance(self, Captured) and blocks and step.cache.prefilled:
            outside.append(len(hidden))
        return run(self, hidden, step, blocks)

    def captured(blocks, used, pairs, tables, few, hidden, **inputs):
        rows.add(len(hidden))
        return _pass(blocks, used, pairs, tables, few, hidden, **inputs)

    monkeypatch.setattr(Fused, "run", spy)
    monkeypatch.setattr("layerskip.backends.captured._pass", captured)
    tasks = [TextRequest([5, 6, 7 + n], max_new_tokens=3 * n) for n in range(1, 9)]
    serving = Serving(model, max_rows=8, lookup=False, controller=Fickle(0), **CAPTURED)
    texts_alone(model, serving, tasks)
    assert outside == []
    assert rows == {1, 2, 4, 8}


@pytest.mark.parametrize("kind", BLOCKS)
def test_trained_modules_draft(kind, model, tmp_path):
    """They draft exactly what they draft for each text alone: no states are mixed up."""
    exit_layer = 2 if kind == "exit-block" else None
    skip = SkipConfig(exit_layer=exit_layer, trained=weights_of(kind, model, tmp_path))
    how = {"controller": "fixed", "max_draft_length": 3, "lookup": False}
    how |= {"skip": skip, "execution": "fused"}
    serving = Serving(model, max_rows=4, **how)
    draw, begun = random.Random(1), list(range(10, 30))
    told = []
    lone = []
    for number in range(7):
        prompt = begun[: draw.randint(0, 20)] + [draw.randrange(VOCABULARY) for _ in range(3)]
        new = draw.randint(5, 16)
        rounds = [*decode(model, torch.tensor([prompt]), max_new_tokens=new, **how)]
        drafted, accepted = (sum(getattr(r, n)[0] for r in rounds) for n in ("drafted", "accepted"))
        lone.append((number, drafted, accepted))

        def tell(piece, number=number):
            if piece.reason is not None:
                told.append((number, piece.counts.drafted, piece.counts.accepted))

        serving.submit(TextRequest(prompt, new), tell)
        for _ in range(draw.randint(0, 3)):
            serving.step()
    drain(serving)
    assert sorted(told) == lone
    assert sum(accepted for *_, accepted in lone) > 3
    assert held_bytes(serving) == serving.stats.used


def held_bytes(serving):
    """Bytes of keys, values and tapped states."""
    passes = serving._batch.passes
    held = [*passes._tapped.values()]
    for cache in passes._caches:
        held += [*cache.keys.values(), *cache.values.values()]
    return sum(each.nbytes for each in held)


def test_a_second_model_drafts(model):
    """It catches up with texts that join a running batch, and its keys count as memory."""
    second = near(model, 0.05)
    for seed in range(4):
        schedule(model, seed, assistant=second, memory=400_000)
    serving = Serving(
        model, controller="fixed", max_draft_length=4, assistant=second, execution="fused"
    )
    told = finished(serving, TextRequest([3, 4, 5], 40))
    assert told[-1].counts.accepted > 10
    assert held_bytes(serving) == serving.stats.used


def test_a_second_model_limits_texts(model):
    second = lively_model("llama", max_position_embeddings=64)
    assert Serving(model, assistant=second, execution="fused").max_tokens == 64


class Phrases(Source):
    """A user's source: repeats the last token but one, then 7."""

    key = "phrases"

    def open(self, batch):
        return PhraseState(batch)


class PhraseState(State):
    def offer(self, row, most):
        return Proposal.of([*self.batch.emitted[row], 7][-2:][:most], match=2)


@pytest.mark.parametrize("kind", ["whole", "recurrent", "whole assistant", "official", "own"])
def test_whatever_generate_takes_is_served(model, kind):
    """Whole models as targets and as second models, official assistants, a user's sources."""
    how = {"memory": 400_000, "skip": None}
    if kind == "whole":
        model, how["execution"] = small_model("phi", vocab_size=VOCABULARY), "auto"
    elif kind == "recurrent":
        model = small_model("falcon_h1", vocab_size=VOCABULARY)
        how |= {"skip": SkipConfig.low_precision(8), "execution": "auto", "sources": []}
    elif kind == "whole assistant":
        how |= {"assistant": small_model("phi", vocab_size=VOCABULARY), "execution": "auto"}
    elif kind == "official":
        model = target_of("gemma4", VOCABULARY)
        how["assistant"] = assistant_of("gemma4", tokens=VOCABULARY)
    else:
        how["sources"] = [Phrases()]
    for seed in range(3):
        schedule(model, seed, **how)


@pytest.mark.parametrize("family", ["gemma3", *thorough("mistral")])
def test_layers_with_windows(family, sizes):
    sizes(piece=8)
    long = [*range(VOCABULARY)]
    model = lively_model(family)
    for seed in range(2):
        schedule(model, seed, [long, long[:60], [*long[:80], 1], []], memory=400_000)


def test_layers_with_windows_hold_little_in_every_row(sizes):
    """A text that joins at slot 0 beside long texts needs no more memory."""
    sizes(piece=8)
    model = lively_model("gemma3")
    serving = Serving(model, max_rows=2, **SETTINGS)
    tasks = [TextRequest([*range(97)] * 2, 12), TextRequest([3, 4, 5], 40)]
    told = [[], []]
    for task, pieces in zip(tasks, told, strict=True):
        serving.submit(task, pieces.append)
        while not pieces:
            serving.step()
    cache = serving._batch.passes.cache
    assert cache.bases[0] > 120
    assert cache.bases[1] == 0
    held = [*cache.keys.items(), *cache.values.items()]
    assert held_bytes(serving) == serving.stats.used
    assert {each.shape[2] for layer, each in held if layer in cache.trimmed} == {cache.span}
    assert cache.span < 100 < cache.size
    drain(serving)
    assert [*map(said, told)] == [alone(model, task) for task in tasks]


@pytest.mark.parametrize("execution", [*thorough("modules"), "fused"])
def test_second_best_tokens_are_verified_beside_chains(model, execution):
    """Texts in one batch, sampled and greedy, each keep their own path."""
    how = {"skip": SkipConfig.low_precision(4), "execution": execution}
    controller = Growing(1)
    serving = Serving(model, max_rows=3, controller=controller, max_draft_length=6, **how)
    tasks = [TextRequest([3, 4, seed], 60, do_sample=seed > 0, seed=seed) for seed in range(5)]
    texts_alone(model, serving, tasks)
    assert controller.seconds[1] > 2


def test_a_text_learns_its_own_laws_and_forgets_others(model, monkeypatch):
    """At most as many as a text may hold. A new text in a seat starts without any."""
    monkeypatch.setattr("layerskip.research.logit_lookup.OF_A_TEXT", 30)
    how = {"controller": "fixed", "lookup": False, **SETTINGS}
    serving = Serving(model, max_rows=1, sources=[LogitLookup()], **how)
    used, accepted = [], []
    for new in (50, 9, 50):
        told = finished(serving, TextRequest([3, 4, 5], new, eos=frozenset()))
        used.append(serving.stats.drafts_used)
        accepted.append(told[-1].counts.drafted)
    assert used == [30 * 1024, used[1], 30 * 1024]
    assert 9 * 1024 <= used[1] < 30 * 1024
    assert accepted[0] == accepted[2]


def test_a_source_that_texts_would_share_is_refused(model):
    source = Lookup()
    source.keeps_texts = True
    with pytest.raises(ValueError, match="Lookup learns from the texts of all clients"):
        Serving(model, sources=[source], **SETTINGS)
    assert Serving(model, sources=[source], remember="shared", **SETTINGS)


def test_a_top_k_beyond_any_vocabulary_leaves_nothing_out(model):
    texts = [
        alone(model, TextRequest([3, 4, 5], 20, do_sample=True, top_k=top_k))
        for top_k in (0, 2**70)
    ]
    assert texts[0] == texts[1]
    law = Law([TopKLogitsWarper(2**70)], do_sample=True, rows=1)
    assert law.warp.top_k < 2**31  # the range of native passes


def test_scores_of_a_prompts_end_start_from_what_is_known(model):
    """As when evaluation tools score several choices for one question."""
    serving, question = Serving(model, **SETTINGS), [*range(5, 25)]
    for number, choice in enumerate(([30, 31, 32], [40], [30, 41])):
        tokens = [*question, *choice]
        told = finished(serving, TextRequest(tokens, 1, top_logprobs=1, prompt_logprobs=20))
        scores = [each for piece in told for each in piece.prompt_logprobs]
        with torch.no_grad():
            laws = model(torch.tensor([tokens])).logits[0].log_softmax(-1)  # (T, V)
        for place, (token, each) in enumerate(zip(choice, scores, strict=True), 19):
            assert each[token] == pytest.approx(float(laws[place, token]))
            assert max(each, key=each.get) == int(laws[place].argmax())
        assert told[-1].counts.cached == (19 if number else 0)


def test_a_prediction_is_indexed_once_for_all_texts(model):
    serving, predicted = Serving(model, **SETTINGS), [5, 6, 7]
    tasks = [TextRequest([3, 4], 4, predicted=predicted, seed=seed) for seed in range(3)]
    texts = serving.submit_all([(task, lambda piece: None) for task in tasks])
    assert len({id(text.index) for text in texts}) == 1
    with pytest.raises(ValueError, match="empty"):  # all tasks or none
        serving.submit_all([(task, print) for task in (tasks[0], TextRequest([]))])
    assert serving.stats.waiting == 3


def test_a_full_queue_refuses(model):
    serving = Serving(model, max_queue=2, **SETTINGS)
    for _ in range(2):
        serving.submit(TextRequest([1, 2]), lambda piece: None)
    with pytest.raises(Refusal, match="at most 2 texts: 2 are waiting, and 1 more were requested"):
        serving.submit(TextRequest([1, 2]), lambda piece: None)


def test_a_task_that_can_never_fit_is_refused_by_numbers(model):
    serving = Serving(model, memory=1000, **SETTINGS)
    with pytest.raises(ValueError, match="may take 1,000; shorten the prompt"):
        serving.submit(TextRequest([1, 2]), lambda piece: None)
    with pytest.raises(ValueError, match=r"at most 256, got 2 [+] 255"):
        serving.submit(TextRequest([1, 2], max_new_tokens=255), lambda piece: None)


@pytest.mark.parametrize(("name", "value"), [("acceptance", "rejection"), ("seed", 3)])
def test_settings_that_cannot_be_served_name_themselves(model, name, value):
    with pytest.raises(ValueError, match=rf"not support.*{name}"):
        Serving(model, **{**SETTINGS, name: value})


def test_a_pass_that_fails_ends_its_texts_and_others_go_on(model):
    serving = Serving(model, controller=Fickle(3), **SETTINGS)
    task = TextRequest([3, 4, 5], max_new_tokens=20)
    told = [[], [], []]
    for pieces in told[:2]:
        serving.submit(task, pieces.append)
    for _ in range(3):
        serving.step()

    def fail(*_):
        raise RuntimeError("out of order\nand more")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving._batch.passes, "verify", fail)
        serving.submit(TextRequest([9] * 4, max_new_tokens=20), told[2].append)
        serving.step()
    again = finished(serving, task)
    for pieces in told:
        assert (pieces[-1].reason, pieces[-1].error) == ("error", "RuntimeError: out of order")
    assert said(again) == alone(model, task)
    assert serving.stats.rows == 0


@pytest.mark.parametrize("name", ["seat", "leave"])
def test_the_thread_goes_on_if_a_text_cannot_join_or_leave(model, name, monkeypatch):
    serving, task = Serving(model, **SETTINGS), TextRequest([3, 4, 5], max_new_tokens=6)

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(serving._batch.passes, name, fail)
        told = finished(serving, task)
    assert (told[-1].reason, told[-1].error) == ("error", "RuntimeError: out of memory")
    assert said(finished(serving, task)) == alone(model, task)
    assert serving.stats.rows == 0


def listener():
    """The pieces of a task, an event of its end, and the function that receives them."""
    told, done = list[Piece](), threading.Event()

    def tell(piece):
        told.append(piece)
        if piece.reason is not None:
            done.set()

    return told, done, tell


def test_a_thread_that_ends_by_an_error_says_so(model, monkeypatch):
    serving, (told, done, tell) = Serving(model, **SETTINGS), listener()

    def fail():
        raise RuntimeError("worse")

    monkeypatch.setattr(serving._batch, "clear", fail)
    monkeypatch.setattr(serving._batch, "round", fail)
    serving.start()
    assert serving.alive
    serving.submit(TextRequest([3, 4, 5], max_new_tokens=6), tell)
    assert done.wait(60)
    assert (told[-1].reason, told[-1].error) == ("error", "RuntimeError: worse")
    while serving.alive:
        pass
    with pytest.raises(Refusal, match="ended with an error") as refused:
        serving.submit(TextRequest([3]), tell)
    assert refused.value.status == 503
    serving.stop()


class Broken(Counting):
    def start(self):
        raise RuntimeError("no more")


@pure
def broken(history, scores):
    if history.shape[1] > 6:
        raise RuntimeError("no more")
    return scores


@pytest.mark.parametrize("processor", [broken, Broken()], ids=["function", "grammar"])
def test_an_error_of_a_processor_ends_its_task_only(model, processor):
    serving, fine = Serving(model, controller="fixed", **SETTINGS), TextRequest([3, 4, 5], 20)
    wrong = TextRequest([3, 4, 5], 20, processors=[processor])
    told, others = together(serving, [wrong, fine])
    assert (told[-1].reason, told[-1].error) == ("error", "RuntimeError: no more")
    assert said(others) == alone(model, fine)
    assert others[-1].reason == "length"


def test_forced_tokens_are_drafted_and_forbidden_ones_are_not(model):
    how = {"controller": "fixed", "max_draft_length": 12, "lookup": False}
    serving = Serving(model, **how, **SETTINGS)
    task = TextRequest(
        [3, 4, 5], max_new_tokens=40, processors=[Counting()], predicted=[20, 21, 5, 6]
    )
    told = finished(serving, task)
    assert said(told) == [20 + i % 7 for i in range(40)]
    counts = told[-1].counts
    assert counts.drafted == counts.accepted
    assert counts.rounds == 3


@pytest.mark.parametrize("wrong", [{"prompt": []}, {"prompt": [97]}, {"predicted": [-1]}])
def test_tokens_outside_of_the_vocabulary_are_refused(model, wrong):
    with pytest.raises(ValueError, match=r"empty|0[.][.]96"):
        Serving(model, **SETTINGS).submit(
            TextRequest(**{"prompt": [1], **wrong}), lambda piece: None
        )


def test_costs_are_measured_before_the_first_task(model, monkeypatch):
    fresh = lively_model("llama")
    serving = Serving(fresh, **SETTINGS)

    def measure(*_, **__):
        raise AssertionError("measured within a step")

    monkeypatch.setattr(cost_tables, "time_rounds", measure)
    task = TextRequest([3, 4, 5], max_new_tokens=12)
    told = finished(serving, task)
    assert told[-1].error is None
    assert said(told) == alone(fresh, task)


def test_a_prediction_that_is_right_is_accepted(model):
    task = TextRequest([3, 4, 5], max_new_tokens=40, eos=frozenset())
    expected = alone(model, task)
    serving = Serving(model, controller="fixed", max_draft_length=8, lookup=False, **SETTINGS)
    told = finished(serving, TextRequest(**{**vars(task), "predicted": expected}))
    counts = told[-1].counts
    assert counts.predicted == counts.predicted_accepted >= 30
    assert counts.rounds <= 6


def test_a_short_prompt_does_not_wait_for_a_long_one(model, monkeypatch):
    monkeypatch.setattr(scheduler, "PIECE", 16)
    serving = Serving(model, **SETTINGS)
    tasks = [TextRequest([5] * length, max_new_tokens=3) for length in (100, 4, 6)]
    told = [[] for _ in tasks]
    for task, pieces in zip(tasks, told, strict=True):
        serving.submit(task, pieces.append)
    serving.step()
    assert [bool(pieces) for pieces in told] == [False, True, True]
    drain(serving)
    assert [*map(said, told)] == [alone(model, task) for task in tasks]


def test_prompts_that_join_at_once_run_in_one_pass(model, spied):
    """Ragged ones, too; one whose tokens are mostly another's waits for that one."""
    prompts = [[*range(10 * n, 10 * n + 6 + n % 3)] for n in range(8)]
    tasks = [TextRequest(each, 6) for each in (*prompts, [*prompts[0], 3])]
    serving = Serving(model, **SETTINGS)
    ran = spied(Passes, "_run_prompts", lambda passes, chunk, *_: tuple(chunk.shape))
    told = texts_alone(model, serving, tasks)
    assert ran[:2] == [(8, 8), (1, 1)]
    assert [pieces[-1].counts.cached for pieces in told] == [*[0] * 8, 6]


def test_of_equal_prompts_one_is_run_though_they_join_at_once(model):
    serving, same = Serving(model, **SETTINGS), list(range(20, 40))
    tasks = [TextRequest(same, do_sample=True, seed=seed) for seed in range(3)]
    told = [*together(serving, tasks), finished(serving, TextRequest(same, max_new_tokens=4))]
    assert sorted(pieces[-1].counts.cached for pieces in told) == [0, 19, 19, 19]


def test_the_cache_after_many_tasks_is_as_after_few(model):
    serving = Serving(model, max_rows=4, session_memory=0, **SETTINGS)
    used = []
    for _ in range(2):
        how = {"max_new_tokens": 3, "do_sample": True}
        together(serving, [TextRequest([1, 2, seed], seed=seed, **how) for seed in range(12)])
        cache = serving._batch.passes.cache
        used.append((serving.stats.used, sum(each.nbytes for each in cache.keys.values())))
    assert used[0] == used[1]


@pytest.mark.slow
def test_memory_after_2000_tasks_is_as_after_200(model):
    """Memory of the process, of Python, and of keys and values, with those of earlier texts."""
    serving = Serving(model, max_rows=8, session_memory=200_000, **SETTINGS)
    draw, held = random.Random(0), []
    tracemalloc.start()
    for done in range(1, 2001):
        task = any_task(draw, [[], [5, 6, 7, 8, 9]])
        serving.submit(task, lambda piece: None)
        while len(serving._waiting) > 8 and serving.step():
            pass
        if done in (200, 2000):
            drain(serving)
            gc.collect()
            held.append((tracemalloc.get_traced_memory()[0], resident(), serving.stats.used))
    tracemalloc.stop()
    (python, process, keys), (more, larger, same) = held
    assert same == keys
    assert serving.stats.known_used <= 200_000
    assert more - python < 300_000  # bytes
    assert larger - process < 20_000_000


def resident():
    """This process's bytes in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_tasks_of_a_thread_of_its_own(model):
    serving, (told, done, tell) = Serving(model, **SETTINGS), listener()

    serving.start()
    task = TextRequest([3, 4, 5], max_new_tokens=6)
    serving.submit(task, tell)
    assert done.wait(60)
    waits = []
    serving.submit(TextRequest([3], max_new_tokens=200), waits.append)
    serving.stop()
    assert said(told) == alone(model, task)
    assert waits[-1].reason in ("cancelled", "length")


def test_the_harness_of_evaluations_takes_it_as_a_model():
    """Texts and scores equal those of lm-evaluation-harness's own class for transformers."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from layerskip.bench.lm_eval import LayerSkipLM

    loaded = load("demo-llama", dtype="float64")
    theirs = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=2)
    few = {"until": ["\n"], "max_gen_toks": 12}
    asked = {
        "generate_until": [("def f(x", few), ("import", few)],
        "loglikelihood": [("def f", "(x):"), ("def f", "(x, y)"), ("", "import os")],
        "loglikelihood_rolling": [("import os\nimport sys\n" * 5,)],
    }
    for draft in (True, False):
        ours = LayerSkipLM("demo-llama", dtype="float64", batch_size=2, draft=draft)
        for kind, arguments in asked.items():
            requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
            got, want = (getattr(each, kind)(requests) for each in (ours, theirs))
            if kind != "generate_until":
                got, want = (torch.tensor(each, dtype=torch.float64) for each in (got, want))
                torch.testing.assert_close(got, want)
            assert kind != "generate_until" or got == want
