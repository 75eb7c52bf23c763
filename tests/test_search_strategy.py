"""The search as an Optuna study: what it finds is good, and nothing is lost or repeated."""

import math
import multiprocessing
import os
import signal
import socket
import sqlite3
import sys
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import optuna
import pytest
from covering import covering
from landscapes import Landscape, best_by_long_search
from optuna.trial import TrialState

from layerskip.files.records import redacted
from layerskip.search import proposals, sampler, study, warm_starts
from layerskip.search.proposals import History
from layerskip.search.space import Space
from layerskip.search.storage import quiet
from layerskip.search.study import Evaluation, open_study, run

TWELVE_BITS = Space(kind="sublayer", num_layers=6, allow_ends=True)
LAYERS = Space(kind="layer", num_layers=4)  # 8 sets
THREE_WAYS = Space(kind="sublayer", num_layers=3, bits=8)  # 216 sets
LARGER = Space(kind="sublayer", num_layers=12)  # 21 switches


@pytest.fixture(scope="module")
def context():
    """Makes processes that need not import what the others did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["layerskip.search.study", "landscapes"])
    return context


def evaluation_of(space: Space, landscape: Landscape, *, floor: float | None = None):
    """`evaluate` for `run`; with a floor, as if drafting turned itself off below it."""

    def evaluate(skip):
        value, acceptance, cost = landscape(space.mask(skip))
        if floor is None:
            return Evaluation(value=value, acceptance=acceptance, draft_cost=cost)
        return Evaluation(
            value=max(value, floor), guide=value, acceptance=acceptance, draft_cost=cost
        )

    return evaluate


def searched(space: Space, landscape: Landscape, trials: int, *, storage=None, **options):
    found = open_study(space, storage=storage)
    evaluate = evaluation_of(space, landscape, floor=options.pop("floor", None))
    run(found, space, evaluate, trials=trials, warm_starts=warm_starts.standard(space), **options)
    return found


def story(found) -> list[tuple]:
    """What a study tells, trial by trial, of what does not depend on the process."""
    attributes = ("origin", "skipped", "acceptance")
    return [(t.value, t.params, *(t.user_attrs.get(a) for a in attributes)) for t in found.trials]


def masks(found) -> list[int]:
    return [int(t.user_attrs["skipped"], 16) for t in found.trials]


def running(found, worker: str | None = None, **attributes):
    """A trial that another worker runs, by default one of this machine that lives."""
    with quiet():
        trial = found.ask()
    trial.set_user_attr("worker", worker or f"{socket.gethostname()}:{os.getppid()}")
    for name, value in attributes.items():
        trial.set_user_attr(name, value)
    return trial


class TestQuality:
    @pytest.mark.parametrize("exits", [False, pytest.param(True, marks=pytest.mark.thorough)])
    def test_finds_the_optimum_of_twelve_bits(self, exits):
        landscape = Landscape(6, seed=2, exits=exits)
        optimum = max(landscape(mask)[0] for mask in TWELVE_BITS.enumerate())
        for seed in range(2):
            found = searched(TWELVE_BITS, landscape, 120, seed=seed)
            assert found.best_trial.value == pytest.approx(optimum)

    @pytest.mark.parametrize("exits", [False, pytest.param(True, marks=pytest.mark.thorough)])
    def test_finds_the_optimum_of_three_choices(self, exits):
        space, landscape = (
            Space(kind="sublayer", num_layers=4, bits=8),
            Landscape(4, 2, exits=exits),
        )
        values = {mask: landscape(mask)[0] for mask in space.enumerate()}
        optimum = max(values.values())
        alike = [space.left_out(mask) for mask in values]
        alike += [space.low_mask(mask) for mask in alike]
        assert max(values[mask] for mask in alike) < optimum
        for seed in range(2):
            found = searched(space, landscape, 120, seed=seed)
            assert found.best_trial.value == pytest.approx(optimum)

    @pytest.mark.parametrize(
        ("exits", "floor"), [(False, None), (True, None), (False, 1.0)], ids=str
    )
    def test_comes_near_a_long_search(self, exits, floor):
        space, landscape = LARGER, Landscape(12, 0, exits=exits)
        _, optimum = best_by_long_search(landscape, space, restarts=1)
        landscape.calls = 0
        found = searched(space, landscape, 150, floor=floor)
        assert landscape.calls == 150
        assert found.best_trial.value >= 0.99 * optimum

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("size", "seed", "exits"),
        covering(((16, 200), (24, 250), (32, 300)), range(3), (False, True)),
    )
    def test_comes_near_long_searches(self, size, seed, exits):
        num_layers, trials = size
        space = Space(kind="sublayer", num_layers=num_layers)
        landscape = Landscape(num_layers, seed, exits=exits)
        _, optimum = best_by_long_search(landscape, space)
        assert searched(space, landscape, trials).best_trial.value >= 0.99 * optimum


class TestLedger:
    def test_every_trial_has_an_origin_and_a_set_of_its_own(self):
        found = searched(TWELVE_BITS, Landscape(6, 0), 40)
        origins = Counter(t.user_attrs["origin"].partition(":")[0] for t in found.trials)
        assert origins.keys() == {"seed", "single", "ranked", "local", "tpe"}
        assert origins["single"] == 12
        assert len(set(masks(found))) == 40
        for trial, mask in zip(found.trials, masks(found), strict=True):
            assert TWELVE_BITS.params(mask) == trial.params
            assert {"acceptance", "draft_cost", "worker"} <= trial.user_attrs.keys()
            assert trial.state is TrialState.COMPLETE

    def test_what_comes_next_follows_from_the_seed(self):
        space, landscape = LARGER, Landscape(12, 0)
        found = searched(space, landscape, 70)
        assert "tpe" in {t.user_attrs["origin"] for t in found.trials}
        assert story(searched(space, landscape, 70)) == story(found)
        assert story(searched(space, landscape, 70, seed=1)) != story(found)

    def test_stops_where_the_space_ends(self):
        for space in (LAYERS, Space(kind="exit", num_layers=7), Space(kind="layer", num_layers=1)):
            found = searched(space, Landscape(space.num_layers, 0), 100)
            assert sorted(masks(found)) == sorted(space.enumerate())

    def test_no_set_that_a_running_trial_claims_is_proposed(self, monkeypatch):
        found = open_study(LAYERS)
        others = [running(found, skipped=hex(0b1100 << 2 * number)) for number in range(2)]
        evaluate, waited = evaluation_of(LAYERS, Landscape(4, 0)), []

        def end(seconds):  # the others do, when there is nothing else to wait for
            waited.append(len(found.trials))
            other = others.pop()
            other.set_user_attr("origin", "local")
            found.tell(other, 1.0)

        monkeypatch.setattr(study.time, "sleep", end)
        run(found, LAYERS, evaluate, trials=10, warm_starts={"x": 0b1100})
        assert sorted(masks(found)) == sorted(LAYERS.enumerate())
        assert waited == [8, 8]

    def test_claims_made_at_the_same_moment_are_taken_back(self, monkeypatch):
        found, claims = open_study(LAYERS), []
        set_attribute = sampler._set

        def interfere(study, trial, name, value):
            set_attribute(study, trial, name, value)
            if name == "skipped":
                claims.append(value)
                if len(claims) == 1:  # another worker's trial claims the same before we look again
                    study.add_trial(
                        optuna.trial.create_trial(
                            state=TrialState.RUNNING,
                            user_attrs={"skipped": value, "origin": "single"},
                        )
                    )

        monkeypatch.setattr(sampler, "_set", interfere)
        monkeypatch.setattr(sampler.time, "sleep", lambda seconds: None)
        run(found, LAYERS, evaluation_of(LAYERS, Landscape(4, 0)), trials=2, warm_starts={})
        assert len(claims) == 3  # one was taken back
        assert len(set(masks(found))) == len(found.trials) == 3
        assert found.trials[0].state is TrialState.COMPLETE

    def test_progress_tells_the_best_so_far(self):
        told = []
        found = searched(LAYERS, Landscape(4, 0), 5, on_trial=told.append)
        assert [p.finished for p in told] == [1, 2, 3, 4, 5]
        assert told[-1].best == found.best_trial.value
        assert told[-1].best_origin == found.best_trial.user_attrs["origin"]

    def test_a_session_leaves_optuna_as_it_was(self):
        optuna.logging.set_verbosity(optuna.logging.INFO)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            searched(TWELVE_BITS, Landscape(6, 0), 30)
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
        assert caught == []


class TestStops:
    def test_resuming_goes_on_as_if_nothing_had_stopped(self, tmp_path):
        landscape, space = Landscape(7, 1), Space(kind="sublayer", num_layers=7)
        whole = searched(space, landscape, 33, seed=3)
        for storage in (tmp_path / "study.log", f"sqlite:///{tmp_path}/study.db"):
            searched(space, landscape, 25, seed=3, storage=storage)
            assert story(searched(space, landscape, 33, seed=3, storage=storage)) == story(whole)
        assert {"local", "tpe"} <= {t.user_attrs["origin"] for t in whole.trials[25:]}

    @pytest.mark.parametrize("end", [KeyboardInterrupt, study.OutOfTime])
    def test_what_is_finished_is_kept_and_what_ran_is_tried_again(self, end):
        found = open_study(LAYERS)
        evaluate = evaluation_of(LAYERS, Landscape(4, 0))

        def interrupted(skip):
            if len(found.trials) == 4:
                raise end
            return evaluate(skip)

        with nullcontext() if end is study.OutOfTime else pytest.raises(KeyboardInterrupt):
            run(found, LAYERS, interrupted, trials=8, warm_starts={})
        assert [t.state.name for t in found.trials] == ["COMPLETE"] * 3 + ["FAIL"]
        run(found, LAYERS, evaluate, trials=8, warm_starts={})
        assert masks(found)[3] == masks(found)[4]
        assert sorted({*masks(found)}) == sorted(LAYERS.enumerate())

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_values_that_are_no_numbers_end_the_search(self, value):
        found = open_study(LAYERS)
        evaluate = evaluation_of(LAYERS, Landscape(4, 0))
        with pytest.raises(ValueError, match="must have a finite value, got"):
            run(found, LAYERS, lambda _: Evaluation(value=value), trials=8, warm_starts={"none": 0})
        run(found, LAYERS, evaluate, trials=8, warm_starts={"none": 0})
        assert masks(found).count(0) == 1  # nor is it asked for again

    def test_time_over(self, monkeypatch):
        """Trials take a second each; none begins after three and a half."""
        seconds = [0.0]
        monkeypatch.setattr(study.time, "monotonic", lambda: seconds[0])
        found, evaluate = open_study(LAYERS), evaluation_of(LAYERS, Landscape(4, 0))

        def slow(mask):
            seconds[0] += 1.0
            return evaluate(mask)

        run(found, LAYERS, slow, trials=8, warm_starts={}, timeout=3.5)
        assert len(found.trials) == 4

    def test_fails_the_running_trials_of_dead_processes_only(self, tmp_path):
        found = open_study(LAYERS, storage=tmp_path / "study.log")
        here = socket.gethostname()
        dead = multiprocessing.get_context("spawn").Process(target=print)
        dead.start()
        dead.join()
        for process in (os.getppid(), dead.pid, os.getpid()):
            running(found, f"{here}:{process}")
        running(found, "far:1")
        found.ask()  # killed before it said whose it is
        with quiet():
            study.fail_abandoned(found, {})
        states = ["RUNNING", "FAIL", "FAIL", "RUNNING", "RUNNING"]
        assert [t.state.name for t in found.trials] == states

    def test_what_a_far_worker_left_in_a_journal_is_taken_up_at_last(self, monkeypatch, tmp_path):
        found = open_study(LAYERS, storage=tmp_path / "study.log")
        evaluate = evaluation_of(LAYERS, Landscape(4, 0))
        running(found, "far:1", origin="local", skipped="0xf0")
        clock = [1000.0]
        monkeypatch.setattr(study.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(study.time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 50))
        run(found, LAYERS, evaluate, trials=3, warm_starts={})
        assert [t.state.name for t in found.trials] == ["FAIL", *["COMPLETE"] * 3]
        assert 0xF0 not in masks(found)[1:3]
        assert masks(found)[3] == 0xF0
        assert found.trials[3].user_attrs["origin"] == "local"
        assert 0 < clock[0] - 1000 - study.PATIENCE <= 100

    def test_a_silent_worker_s_trial_in_a_database_is_taken_up(self, tmp_path):
        found = open_study(LAYERS, storage=f"sqlite:///{tmp_path}/study.db")
        evaluate, database = evaluation_of(LAYERS, Landscape(4, 0)), tmp_path / "study.db"
        running(found, "far:1", origin="local", skipped="0xf0")
        found._storage.record_heartbeat(found.trials[0]._trial_id)
        with quiet():
            study.fail_abandoned(found, {})
        assert found.trials[0].state is TrialState.RUNNING
        with sqlite3.connect(database) as connection:
            connection.execute("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
        run(found, LAYERS, evaluate, trials=2, warm_starts={})
        assert [t.state.name for t in found.trials] == ["FAIL", "COMPLETE", "COMPLETE"]
        assert masks(found)[1] == 0xF0
        with sqlite3.connect(database) as connection:
            assert connection.execute("SELECT count(*) FROM trial_heartbeats").fetchone() == (3,)

    def test_a_trial_failed_by_another_worker_ends_quietly(self):
        found = open_study(LAYERS)
        evaluate = evaluation_of(LAYERS, Landscape(4, 0))

        def slow(skip):
            if len(found.trials) == 2:
                found.tell(1, state=TrialState.FAIL)
            return evaluate(skip)

        run(found, LAYERS, slow, trials=3, warm_starts={})
        assert [t.state.name for t in found.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


class TestStorage:
    def test_half_a_line_is_cut_off(self, tmp_path):
        path = tmp_path / "study.log"
        found = searched(LAYERS, Landscape(4, 0), 3, storage=path)
        before, lines = story(found), path.read_bytes()
        path.write_bytes(lines + b'{"op_code":5,"worker')
        resumed = searched(LAYERS, Landscape(4, 0), 8, storage=path)
        assert story(resumed)[:3] == before
        assert path.read_bytes().startswith(lines)
        assert len(resumed.trials) == 8

    def test_a_study_of_other_hands_is_refused(self, tmp_path):
        url = f"sqlite:///{tmp_path}/study.db"
        optuna.create_study(storage=url, study_name="layerskip").add_trial(
            optuna.trial.create_trial(value=1.0)
        )
        with pytest.raises(ValueError, match="was made with another space"):
            open_study(LAYERS, storage=url)

    @pytest.mark.parametrize(
        "storage",
        [
            "sqlite:////no/such/folder/study.db",
            "postgresql://me:hunter2@localhost:1/db",
            "nonsense://me:hunter2@localhost:1/db?password=hunter2",
            "{tmp}/folder",
            "{tmp}/file/study.log",
            "{tmp}/file",
        ],
    )
    def test_storages_that_cannot_be_opened(self, storage, tmp_path):
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_text("not a journal\nat all\n")
        storage = storage.format(tmp=tmp_path)
        with pytest.raises(ValueError, match="cannot open the study 'layerskip' in ") as caught:
            open_study(LAYERS, storage=storage)
        assert "hunter2" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__suppress_context__

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("mysql+pymysql://me:p@ss:w/rd@host:3306/db", "mysql+pymysql://me:***@host:3306/db"),
            ("redis://:hunter2@host", "redis://:***@host"),
            ("x://h/db?user=me&password=hunter2&a=b", "x://h/db?user=me&password=***&a=b"),
            ("--storage=x://u:pw@h/d --seed 3", "--storage=x://u:***@h/d --seed 3"),
            ("x://host:5432/db and sqlite:///a.db", "x://host:5432/db and sqlite:///a.db"),
            ("mail me@host: soon", "mail me@host: soon"),
        ],
    )
    def test_redacts_passwords(self, text, expected):
        assert redacted(text) == expected

    def test_a_storage_that_goes_away(self, tmp_path, monkeypatch):
        path = tmp_path / "study.db"
        found = open_study(LAYERS, storage=f"sqlite:///{path}")
        evaluations = 0

        def evaluate(skip):
            nonlocal evaluations
            evaluations += 1
            if evaluations == 3:
                with sqlite3.connect(path) as database:
                    database.execute("DROP TABLE trial_values")
            return Evaluation(value=1.0)

        with pytest.raises(ValueError, match=r"^the study's storage failed: [^\n]*$"):
            run(found, LAYERS, evaluate, trials=8, warm_starts={"none": 0})
        assert evaluations == 3


class TestWorkers:
    """Processes that share a storage, and end when they like or when they do not."""

    def launch(self, context, storage, trials, log=None, seconds=0.0):
        process = context.Process(target=work, args=(str(storage), trials, log, seconds))
        process.start()
        return process

    @pytest.mark.parametrize(
        ("storage", "trials"),
        [
            ("study.log", 24),
            pytest.param("sqlite:///{}/study.db", 20, marks=pytest.mark.slow),
        ],
    )
    def test_two_workers_share_a_study(self, context, storage, trials, tmp_path):
        storage = storage.format(tmp_path) if "{}" in storage else tmp_path / storage
        open_study(LARGER, storage=storage)
        workers = [self.launch(context, storage, trials, seconds=0.002) for _ in range(2)]
        for process in workers:
            process.join(120)
            assert process.exitcode == 0
        found = open_study(LARGER, storage=storage)
        assert {t.state for t in found.trials} == {TrialState.COMPLETE}
        assert trials <= len(found.trials) <= trials + 1
        assert len({t.user_attrs["worker"] for t in found.trials}) == 2
        assert len(set(masks(found))) == len(found.trials)

    def test_killed_workers_lose_nothing(self, context, tmp_path):
        storage, log, kills = tmp_path / "study.log", tmp_path / "told.txt", 2
        open_study(LARGER, storage=storage)
        log.touch()
        for kill in range(kills):
            process = self.launch(context, storage, 1000, str(log), seconds=0.002)
            told = log.stat().st_size
            while log.stat().st_size == told and process.is_alive():  # until it works
                time.sleep(0.005)
            time.sleep(0.01 + 0.037 * kill % 0.2)
            process.kill()
            process.join(60)
            assert process.exitcode == -signal.SIGKILL
        told = [line.split() for line in log.read_text().splitlines()]
        last = self.launch(context, storage, len(told) + 3)
        last.join(120)
        assert last.exitcode == 0
        found = open_study(LARGER, storage=storage)
        complete = {t.number: t for t in found.trials if t.state is TrialState.COMPLETE}
        for number, value in told:
            assert complete[int(number)].value == float(value)
        assert len(complete) >= len(told) + 3
        # one that was killed before it said whose it is stays as it was
        owned = [t for t in found.trials if "worker" in t.user_attrs]
        assert {t.state for t in owned} <= {TrialState.COMPLETE, TrialState.FAIL}
        assert len(found.trials) - len(complete) <= kills
        assert len({t.user_attrs["skipped"] for t in complete.values()}) == len(complete)
        # Optuna lets go of its lock in two steps; a kill between them leaves the renamed link
        left = {p.name for p in tmp_path.iterdir() if not p.name.startswith("study.log.lock")}
        assert left == {"study.log", "told.txt"}


def work(storage: str, trials: int, log: str | None, seconds: float) -> None:
    """A worker process: searches, and writes down what it was told is finished."""
    landscape, found = Landscape(12, 0), open_study(LARGER, storage=storage)
    evaluate = evaluation_of(LARGER, landscape)

    def slow(skip):
        time.sleep(seconds)
        return evaluate(skip)

    def tell(_):
        if log is not None:
            mine = [t for t in found.get_trials(deepcopy=False) if t.value is not None]
            with Path(log).open("a") as told:
                told.write(f"{mine[-1].number} {mine[-1].value!r}\n")

    run(found, LARGER, slow, trials=trials, warm_starts=warm_starts.standard(LARGER), on_trial=tell)
    sys.exit(0)


class TestProposals:
    def history(self, scores: dict[int, float], losses=None) -> History:
        return History(scores=scores, losses=losses or {}, taken=set(scores))

    def test_the_path_leaves_out_what_costs_least(self):
        """Value rises up to 5 of 8 layers in the order of their losses, then falls."""
        space = Space(kind="layer", num_layers=9, allow_ends=False)
        order = list(reversed(space.leaving_out))
        history = self.history(
            {0: 1.0} | dict.fromkeys(order, 0.9), {s: float(i) for i, s in enumerate(order)}
        )
        tried = []
        while (mask := proposals.next_on_path(space, history)) is not None:
            count = mask.bit_count() // 2
            assert mask == sum(order[:count])
            history.scores[mask] = 2.0 - abs(count - 5) / 10
            history.taken.add(mask)
            tried.append(count)
        assert 5 in tried
        assert len(tried) < 8

    def test_switches_are_flipped_on_a_seed_that_pays_well(self):
        exit_ = TWELVE_BITS.exit_mask(3)
        history = self.history({0: 1.0, exit_: 1.05})
        assert proposals.base(history, [0, exit_]) == 0
        history.scores[exit_] = 1.3
        assert proposals.base(history, [0, exit_]) == exit_
        assert proposals.base(self.history({exit_: 1.3}), [exit_]) == 0  # 1.3 may be bad
        switches = TWELVE_BITS.leaving_out
        for number, switch in enumerate(switches):
            single = proposals.next_single(TWELVE_BITS, history, exit_)
            assert single == exit_ ^ switch
            history.scores[single] = 1.3 + 0.01 * number
            history.taken.add(single)
        assert proposals.next_single(TWELVE_BITS, history, exit_) is None
        first = proposals.next_on_path(TWELVE_BITS, history, exit_)
        assert first == exit_ ^ switches[-1] ^ switches[-2]

    def test_local_moves_follow_what_paid(self):
        scores = {}
        for mask in (0, 0b1, 0b10, 0b11, 0b101, 0b110, 0b111, 0b1001, 0b1010):
            scores[mask] = 1.0 + 0.1 * (mask & 1) - 0.1 * (mask >> 1 & 1)
        proposed = proposals.next_local(TWELVE_BITS, self.history(scores))
        assert proposed & 0b11 == 0b01

    def test_precision_is_changed_alone_and_together_with_another(self):
        """From all in low precision: what helps is one sublayer out and another one exact."""
        low = THREE_WAYS.low_mask(0)
        out, exact = 1 << 2, 1 << 6 + 3  # attention 1 out, MLP 1 exact

        def score(mask: int) -> float:
            alone = 0.1 * bool(mask & out) + 0.1 * (not mask & exact)
            return 1.0 + alone - 0.05 * ((mask ^ low) & ~(out | out << 6 | exact)).bit_count()

        history = self.history({0: 0.5, low: score(low)})
        for _ in range(40):
            mask = proposals.next_local(THREE_WAYS, history, base=low)
            assert mask in THREE_WAYS
            history.scores[mask] = score(mask)
            history.taken.add(mask)
        best = max(history.scores, key=history.scores.__getitem__)
        assert best == low & ~(out << 6) & ~exact | out
