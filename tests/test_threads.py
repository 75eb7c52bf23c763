"""CPU threads: how many are chosen, and that their number does not change results."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint
from commands import run
from models import tiny_model
from torch.utils import cpp_extension

from layerskip import decode
from layerskip.model.opened_models import Sublayers
from layerskip.native import extension
from layerskip.timing.threads import cpu_threads, fitting_threads


@pytest.fixture
def opened():
    return Sublayers(tiny_model("llama", dtype=torch.float32), "fused")


@pytest.fixture
def four():
    with cpu_threads(4):
        yield


def clock(seconds):
    """A clock by which each pass takes the given time for its number of threads."""
    now = 0.0

    def look():
        nonlocal now
        now += seconds[torch.get_num_threads()]
        return now

    return look


@pytest.mark.usefixtures("four")
@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 8e-3, 2: 4e-3, 4: 2e-3}, 4),
        ({1: 8e-3, 2: 4e-3, 4: 3.9e-3}, 2),  # hardly faster
        ({1: 1e-3, 2: 4e-3, 4: 9e-3}, 1),
        ({1: 1e-3, 2: 1e-3, 4: 0.2}, 4),  # too slow to try others
    ],
)
def test_the_smallest_number_that_hardly_another_beats_is_chosen(opened, seconds, chosen):
    assert fitting_threads(opened, now=clock(seconds)) == chosen
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four")
def test_the_number_serves_the_next_process(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("LAYERSKIP_CACHE", str(tmp_path))
    assert fitting_threads(opened, now=clock({1: 8e-3, 2: 4e-3, 4: 3.9e-3})) == 2
    assert fitting_threads(opened, now=lambda: pytest.fail("timed again")) == 2


@pytest.mark.usefixtures("four")
def test_a_number_is_chosen_by_a_real_clock_and_from_one_by_none(opened):
    assert fitting_threads(opened) in (1, 2, 4)
    with cpu_threads(1):
        assert fitting_threads(opened, now=lambda: pytest.fail("looked at the clock")) == 1


def _tokens(model):
    prompt = torch.tensor([[5, 7, 11]])
    settings = {"max_new_tokens": 40, "do_sample": True, "seed": 3}
    rounds = decode(model, prompt, enabled=False, eos_token_id=[], keep_scores=True, **settings)
    return [(round_.tokens[0][0], *round_.logits[0][0].tolist()) for round_ in rounds]


def test_more_threads_than_cores_compute_the_same_bits(built):
    """This team waits long enough to sleep, so some of its passes run on one thread."""
    model = tiny_model("gemma3", dtype=torch.float32, hidden_size=256, intermediate_size=512)
    with cpu_threads(1):
        alone = _tokens(model)
    for count in (2, 7):
        with cpu_threads(count):
            assert _tokens(model) == alone
            assert torch.get_num_threads() == count


def test_a_prompt_takes_all_threads_even_if_short_passes_were_disturbed(built):
    """One pass over a prompt takes as long as hundreds of short ones."""
    model = tiny_model("gemma3", dtype=torch.float32, hidden_size=256, intermediate_size=512)
    shallow = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    disturbed = Sublayers(shallow, "native").backend.extension.disturbed
    with cpu_threads(3 * os.cpu_count() + 1):
        while not disturbed():  # this team waits long enough to sleep
            _tokens(model)
    with cpu_threads(2):
        for _ in range(260):  # more passes than ever run on one thread in a row
            next(decode(shallow, torch.full((1, 40), 5), enabled=False, max_new_tokens=1))
            assert disturbed()  # passes on one thread because of that bring it to an end
    with cpu_threads(1):
        while disturbed():
            _tokens(model)


CREW = """
#include <cstdio>
#include <cstdlib>
#include "team.h"
int main(int count, char** given) {
  const int wanted = std::atoi(given[1]);
  Crew crew;
  for (int i = 2; i < count; ++i) {
    const int threads = crew.threads(wanted), slept = std::atoi(given[i]) * (threads - 1);
    std::printf("%d ", threads);
    const auto us = [](int count) { return std::chrono::microseconds(count); };
    if (threads > 1) crew.note(us(3000), us(slept), threads, wanted);
  }
}
"""


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    """A program that says how many threads passes take in which each of them slept so long."""
    binary = tmp_path_factory.mktemp("crew") / "crew"
    flags = [
        "-std=c++17",
        f"-I{Path(extension.__file__).parent / 'csrc'}",
        "-xc++",
        "-",
        "-o",
        str(binary),
    ]
    command = [cpp_extension.get_cxx_compiler(), *flags]
    subprocess.run(command, input=CREW, text=True, check=True)
    return binary


@pytest.mark.parametrize(
    ("wanted", "slept", "taken"),
    [
        # that threads start one after the other is no disturbance, however many they are
        (16, [200] * 4, [16] * 4),
        # each sleeps a quarter of one pass of 3 ms and more, and then of two in a row
        (2, [700, 800, 0, 0, 0, 0], [2, 2, 1, 1, 2, 2]),
        (2, [800, 0, 0, 800, 0, 0, 0, 0, 0], [2, 1, 1, 2, 1, 1, 1, 1, 2]),
        (16, [800, 0, 0, 0, 800, 0, 0, 0], [16, 8, 8, 16, 16, 8, 8, 16]),
        # half the team is disturbed as well
        (16, [800, 800, 0, 800, 0, 0, 0, 0, 0], [16, 8, 4, 16, 4, 4, 4, 4, 16]),
    ],
)
def test_a_team_that_sleeps_much_is_halved_for_some_passes(built, crew, wanted, slept, taken):
    said = subprocess.check_output([*map(str, (crew, wanted, *slept))], text=True)
    assert [*map(int, said.split())] == taken


def test_a_disturbed_round_takes_one_thread_and_gives_the_others_back(built, monkeypatch):
    opened = Sublayers(tiny_model("llama", dtype=torch.float32), "native")
    backend = opened.backend
    with cpu_threads(3):
        for disturbed, during in ((True, 1), (False, 3)):
            monkeypatch.setattr(backend.extension, "disturbed", lambda told=disturbed: told)
            with suppress(KeyError), backend.disturbed():
                assert (torch.get_num_threads(), opened.threads) == (during, 3)
                assert opened.limited is disturbed
                raise KeyError
            assert (torch.get_num_threads(), opened.threads) == (3, 3)


@pytest.mark.usefixtures("built", "four")
@pytest.mark.parametrize(("disturbed", "chosen"), [(False, 1), (True, 4)])
def test_a_busy_moment_takes_no_threads_away_for_good(monkeypatch, disturbed, chosen):
    """While others use the cores, one thread is as fast as four; passes handle that themselves."""
    opened = Sublayers(tiny_model("llama", dtype=torch.float32), "native")
    extension = opened.backend.extension
    monkeypatch.setattr(extension, "disturbed", lambda: disturbed)
    assert fitting_threads(opened, now=clock(dict.fromkeys((1, 2, 4), 4e-3))) == chosen
    assert torch.get_num_threads() == 4


def test_commands_measure_the_number_unless_it_is_known(built, tmp_path, monkeypatch):
    measured = []

    def fitting(opened):
        measured.append(torch.get_num_threads())
        return 1

    monkeypatch.setattr("layerskip.timing.threads.fitting_threads", fitting)
    folder, output = save_checkpoint(tmp_path / "model"), tmp_path / "run.jsonl"
    flags = ["--method", "plain", "--limit", "1", "--max-new-tokens", "4", "--repeats", "1"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w5 w7\n")
    command = ["benchmark", folder, "--prompts", prompts, *flags, "--output", output]
    with cpu_threads(2):
        first = run(*command)
        again = run(*command)
        assert measured == [2]  # a run that continues keeps its number
        assert json.loads(output.read_text().splitlines()[0])["threads"] == 1
        told = "1 thread); more threads gain nothing here (--threads 2 uses all)\n"
        assert told in first.stderr
        assert again.exit_code == first.exit_code == 0
        said = ["generate", folder, "--prompt", "w5", "--max-new-tokens", "2", "--no-draft"]
        assert ", 2 threads)\n" in run(*said, "--threads", "2").stderr
        assert measured == [2]
        assert torch.get_num_threads() == 2
