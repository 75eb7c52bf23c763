"""The search as an Optuna study: it finds good sets, and loses nothing."""

import multiprocessing
import signal
import sqlite3
import time
import warnings
from pathlib import Path

import optuna
import pytest
from landscapes import Landscape, masks_of
from marks import thorough
from optuna.trial import TrialState

from layerskip.files.records import redacted
from layerskip.search import study
from layerskip.search.objective import Evaluation, OutOfTime
from layerskip.search.space import Space
from layerskip.search.storage import quiet
from layerskip.search.study import Sampler, fail_abandoned, finished_sets, open_study, run
from layerskip.search.warm_starts import WARM_STARTS, warm_starts

TWELVE_BITS = Space(kind="sublayer", num_layers=6, allow_ends=True)
LAYERS = Space(kind="layer", num_layers=4)  # 8 sets, one of which skips nothing
LARGER = Space(kind="sublayer", num_layers=12)  # 21 switches


def evaluation_of(landscape):
    def evaluate(mask, losing=lambda *_: False):
        value, acceptance, cost = landscape(mask)
        return Evaluation(
            value=value, acceptance=acceptance, draft_cost=cost, draft_length=1, positions=9
        )

    return evaluate


def searched(space, landscape, trials, *, name="gp", storage=None, seed=0, first=None, **options):
    found, influence = open_study(space, storage=storage), landscape.influence()
    sampler = Sampler(name, space, seed)
    evaluate = options.pop("evaluate", evaluation_of(landscape))
    first = warm_starts(space, influence) if first is None else first
    how = {"sampler": sampler, "trials": trials, "warm_starts": first}
    run(found, space, evaluate, **how, **options)
    return found


def story(found):
    """The trials of a study, without what depends on the process."""
    return [(t.value, t.params, t.user_attrs.get("origin")) for t in found.trials]


def states(found):
    return [trial.state.name for trial in found.trials]


class TestQuality:
    @pytest.mark.parametrize(("bits", "exits"), [(None, False), *thorough((8, True), (8, False))])
    def test_finds_the_optimum_of_spaces_that_are_listed_whole(self, bits, exits):
        space = Space(kind="sublayer", num_layers=4, bits=bits) if bits else TWELVE_BITS
        landscape = Landscape(space.num_layers, seed=2, exits=exits)
        optimum = max(landscape(mask)[0] for mask in masks_of(space))
        assert searched(space, landscape, 50).best_trial.value >= 0.99 * optimum

    @pytest.mark.thorough
    def test_what_similarity_foretells_is_no_more_than_a_hint(self):
        """Negative control of the first sets: the search recovers from the reverse estimate."""
        landscape = Landscape(6, seed=2)
        optimum = max(landscape(mask)[0] for mask in masks_of(TWELVE_BITS))
        wrong = [1 / damage for damage in landscape.damage]
        landscape.influence = lambda: wrong
        values = [t.value for t in searched(TWELVE_BITS, landscape, 70).trials]
        assert max(values[:WARM_STARTS]) < 0.98 * optimum <= max(values)

    def test_most_trials_are_guided(self):
        found = searched(LARGER, Landscape(12, 0), 50)
        origins = [trial.user_attrs["origin"] for trial in found.trials]
        guided = [origin == "gp" for origin in origins]
        assert all(2 * sum(guided[:n]) >= n for n in range(20, 51))
        assert all(origin.startswith("first:") for origin in origins[: guided.index(True)])
        assert guided.index(True) <= WARM_STARTS
        assert study.standing(found).guided == sum(guided)
        assert len(finished_sets(found, LARGER)) == 50


class TestLedger:
    @pytest.mark.parametrize("name", ["gp", "tpe", "random"])
    def test_what_comes_next_follows_from_the_seed(self, name):
        landscape, trials = Landscape(4, 0), 14
        space = Space(kind="sublayer", num_layers=4)
        found = searched(space, landscape, trials, name=name)
        assert name in {t.user_attrs["origin"] for t in found.trials}
        assert len(finished_sets(found, space)) == trials  # none is tried twice
        assert story(searched(space, landscape, trials, name=name)) == story(found)

    def test_stops_where_the_space_ends(self):
        for space in (LAYERS, Space(kind="exit", num_layers=7), Space(kind="layer", num_layers=2)):
            found = searched(space, Landscape(space.num_layers, 0), 100)
            assert sorted(finished_sets(found, space)) == sorted(set(masks_of(space)) - {0})

    @pytest.mark.thorough
    def test_a_draft_that_loses_ends_early(self):
        """The value of such a trial is an estimate; that of the best one is not."""
        landscape, pieces = Landscape(12, 0), []

        def evaluate(mask, losing):
            value, acceptance, cost = landscape(mask)
            ended = losing(value, {n: value * (1 + 0.01 * (n % 3 - 1)) for n in range(8)})
            pieces.append(ended)
            return Evaluation(
                value=value, acceptance=acceptance, draft_cost=cost, draft_length=1, positions=9
            )

        found = searched(LARGER, landscape, 40, evaluate=evaluate)
        early = [bool(trial.user_attrs.get("ended_early")) for trial in found.trials]
        assert early == pieces
        assert 8 < sum(early) < 40
        assert not found.best_trial.user_attrs.get("ended_early")

    def test_a_session_leaves_optuna_as_it_was(self):
        optuna.logging.set_verbosity(optuna.logging.INFO)
        told = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = searched(TWELVE_BITS, Landscape(6, 0), 14, on_trial=told.append)
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
        assert caught == []
        assert [at.finished for at in told] == [*range(1, 15)]
        assert told[-1].best == found.best_trial.value
        assert told[-1].best_origin == found.best_trial.user_attrs["origin"]


class TestStops:
    @pytest.mark.parametrize("storage", ["{}/study.log", *thorough("sqlite:///{}/study.db")])
    def test_resuming_goes_on_as_if_nothing_had_stopped(self, storage, tmp_path):
        landscape, space = Landscape(7, 1), Space(kind="sublayer", num_layers=7)
        whole, storage = searched(space, landscape, 17, seed=3), storage.format(tmp_path)
        searched(space, landscape, 13, seed=3, storage=storage)
        assert story(searched(space, landscape, 17, seed=3, storage=storage)) == story(whole)

    @pytest.mark.parametrize("end", [KeyboardInterrupt, OutOfTime])
    def test_what_is_finished_is_kept_and_the_next_goes_on(self, end, tmp_path):
        evaluate, asked = evaluation_of(Landscape(4, 0)), []

        def interrupted(mask, losing):
            asked.append(mask)
            if len(asked) == 4:
                raise end
            return evaluate(mask)

        how = {"storage": tmp_path / "study.log", "first": {"a": 0b1100, "b": 0b110000}}
        try:
            searched(LAYERS, Landscape(4, 0), 8, evaluate=interrupted, **how)
        except KeyboardInterrupt:
            assert end is KeyboardInterrupt
        found = searched(LAYERS, Landscape(4, 0), 7, **how)
        ended = "PRUNED" if end is OutOfTime else "FAIL"
        assert states(found) == ["COMPLETE"] * 3 + [ended] + ["COMPLETE"] * 4

    def test_a_first_set_that_was_interrupted_is_tried_again(self, tmp_path):
        def interrupted(mask, losing):
            raise OutOfTime

        how = {"storage": tmp_path / "study.log", "first": {"mine": 0b1100}}
        searched(LAYERS, Landscape(4, 0), 3, evaluate=interrupted, **how)
        found = searched(LAYERS, Landscape(4, 0), 3, **how)
        assert found.trials[1].user_attrs["origin"] == "first:mine"
        assert states(found) == ["PRUNED", *["COMPLETE"] * 3]

    def test_time_over(self):
        def slow(mask, losing):
            time.sleep(0.3)
            return evaluation_of(Landscape(4, 0))(mask)

        found = searched(LAYERS, Landscape(4, 0), None, evaluate=slow, timeout=0.1)
        assert states(found)[0] == "COMPLETE"
        assert states(found).count("COMPLETE") == 1

    def test_what_a_killed_process_left_running_in_a_journal_is_failed(self, tmp_path):
        for storage, state in (
            (tmp_path / "study.log", "FAIL"),
            (f"sqlite:///{tmp_path}/study.db", "RUNNING"),  # the storage has heartbeats
        ):
            found = open_study(LAYERS, storage=storage)
            with quiet():
                found.ask()
            fail_abandoned(found)
            assert states(found) == [state]

    def test_a_silent_worker_s_trial_in_a_database_is_run_again(self, tmp_path):
        database = tmp_path / "study.db"
        found = open_study(LAYERS, storage=f"sqlite:///{database}")
        found.enqueue_trial(LAYERS.params(0b1100), user_attrs={"origin": "first:far"})
        with quiet():
            found.ask()
        found._storage.record_heartbeat(found.trials[0]._trial_id)
        how = {"storage": f"sqlite:///{database}", "first": {}}
        assert states(searched(LAYERS, Landscape(4, 0), 1, **how))[0] == "RUNNING"
        with sqlite3.connect(database) as connection:
            connection.execute("UPDATE trial_heartbeats SET heartbeat = '2000-01-01 00:00:00'")
        found = searched(LAYERS, Landscape(4, 0), 3, **how)
        assert states(found)[0] == "FAIL"
        assert 0b1100 in finished_sets(found, LAYERS)


class TestStorage:
    def test_half_a_line_is_cut_off(self, tmp_path):
        path = tmp_path / "study.log"
        before = story(searched(LAYERS, Landscape(4, 0), 3, storage=path))
        lines = path.read_bytes()
        path.write_bytes(lines + b'{"op_code":5,"worker')
        resumed = searched(LAYERS, Landscape(4, 0), 7, storage=path)
        assert story(resumed)[:3] == before[:3]
        assert path.read_bytes().startswith(lines)
        assert states(resumed).count("COMPLETE") == 7

    @pytest.mark.parametrize("line", [b"garbage", b"[1]", b'{"a": 1}', b"\xff\xfe"])
    def test_a_damaged_line_is_named_with_what_to_do(self, line, tmp_path):
        path = tmp_path / "study.log"
        before = story(searched(LAYERS, Landscape(4, 0), 3, storage=path))
        first, rest = path.read_bytes().split(b"\n", 1)
        path.write_bytes(b"\n".join([first, line, rest]))
        with pytest.raises(ValueError, match=r"line 2 of .*study\.log is not .*; remove the line"):
            open_study(LAYERS, storage=path)
        path.write_bytes(b"\n".join([first, rest]))
        assert story(open_study(LAYERS, storage=path)) == before

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
            ("a:b@c http://host:80/x", "a:b@c http://host:80/x"),
        ],
    )
    def test_redacts_passwords(self, text, expected):
        assert redacted(text) == expected

    def test_a_storage_that_goes_away(self, tmp_path):
        path, evaluations = tmp_path / "study.db", []

        def evaluate(mask, losing):
            evaluations.append(mask)
            if len(evaluations) == 3:
                with sqlite3.connect(path) as database:
                    database.execute("DROP TABLE trial_values")
            return evaluation_of(Landscape(4, 0))(mask)

        with pytest.raises(ValueError, match=r"^the study's storage failed: [^\n]*$"):
            searched(LAYERS, Landscape(4, 0), 7, evaluate=evaluate, storage=f"sqlite:///{path}")
        assert len(evaluations) == 3


@pytest.fixture(scope="module")
def launch():
    """Starts `work` in a process that does not import the other tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["layerskip.search.study", "landscapes"])

    def launch(*arguments):
        process = context.Process(target=work, args=tuple(map(str, arguments)))
        process.start()
        return process

    return launch


class TestWorkers:
    """Processes that share a storage and end, or are killed, at any time."""

    @pytest.mark.thorough
    def test_a_killed_worker_loses_nothing(self, launch, tmp_path):
        storage, log = tmp_path / "study.log", tmp_path / "told.txt"
        open_study(LARGER, storage=storage)
        process = launch(storage, 1000, log)
        while not log.exists() or log.stat().st_size < 100:  # until it has begun to work
            assert process.is_alive()
            time.sleep(0.005)
        process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        told = [line.split() for line in log.read_text().splitlines()]
        fail_abandoned(open_study(LARGER, storage=storage))
        last = launch(storage, len(told) + 3, tmp_path / "more.txt")
        last.join(120)
        assert last.exitcode == 0
        found = open_study(LARGER, storage=storage)
        complete = {t.number: t for t in found.trials if t.state is TrialState.COMPLETE}
        for number, value in told:
            assert complete[int(number)].value == float(value)
        assert len(complete) >= len(told) + 3
        assert states(found).count("RUNNING") == 0


def work(storage, trials, log):
    """A worker process: it searches, and logs what it was told is finished."""

    def tell(at):
        last = [t for t in study.get_trials(deepcopy=False) if t.state is TrialState.COMPLETE][-1]
        with Path(log).open("a") as lines:
            lines.write(f"{last.number} {last.value}\n")

    study = open_study(LARGER, storage=storage)
    searched(LARGER, Landscape(12, 0), int(trials), storage=storage, on_trial=tell)
