"""The clocks and the table beside llama.cpp, as far as that goes without it."""

import pytest
from checkpoints import save_checkpoint
from compare_llama_cpp import (
    KINDS,
    Timed,
    common,
    gguf_of,
    main,
    measured,
    ours,
    table,
    through_torch,
)
from models import lively_model, prompt

from layerskip.checkpoints import load
from layerskip.config import SkipConfig


def test_every_way_is_timed_on_the_same_tokens():
    model = lively_model("llama")
    skip = SkipConfig.early_exit(3)
    calls = [
        model.generate,
        ours(model, "fused", enabled=False),
        ours(model, "modules", skip=skip),
    ]
    texts = [through_torch(call, prompt(5), 12) for call in calls]
    for timed in texts:
        assert timed.tokens == texts[0].tokens
        assert len(timed.tokens) == 12
        assert timed.prefill > 0
        assert timed.decode > 0


def test_ways_take_turns_in_going_first():
    seen = []

    def way(name):
        return lambda ids, count: seen.append((name, ids, count)) or Timed([1], 1.0, 1.0)

    ways = {name: way(name) for name in "ab"}
    found = [(name, number) for name, number, _ in measured(ways, ["x", "y"], 9, 1)]
    assert seen[:2] == [("a", "x", 8), ("b", "x", 8)]  # warm-up
    assert [name for name, _, count in seen[2:] if count == 9] == ["a", "b", "b", "a"]
    assert found == [("a", 0), ("b", 0), ("b", 1), ("a", 1)]


def test_the_table_has_medians_ranges_and_equal_tokens():
    def results(name, *seconds, tokens=(1, 2, 3)):
        return [(name, n, Timed(list(tokens), 1.0, s)) for n, s in enumerate(seconds)]

    base = results("llama.cpp", 1.0, 2.0, 4.0)
    lines = table(
        [*base, *results("plain", 0.5, 0.5, 2.0, tokens=(1, 2, 4))], "llama.cpp", "llama.cpp", 10**9
    ).splitlines()
    assert " ".join(lines[1].split()) == "llama.cpp 1.0 (0.5-2.0) 1.0 1.0 1.00 (1.00-1.00) 9/9"
    assert " ".join(lines[2].split()) == "plain 4.0 (1.0-4.0) 2.0 4.0 2.00 (2.00-4.00) 6/9"


def test_only_the_common_beginning_counts():
    assert common([1, 2, 3], [1, 5, 3]) == 1
    assert common([1, 2], [1, 2]) == 2


def test_what_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("compare_llama_cpp.importlib.util.find_spec", lambda _: None)
    with pytest.raises(SystemExit) as end:
        main([])
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert "`pip install llama-cpp-python==" in line
    assert line.count("\n") == 1
    loaded = load(str(save_checkpoint(tmp_path)))
    with pytest.raises(ValueError, match=r"one \.gguf in the folder of .*, got 0; `make checkp"):
        gguf_of(loaded)
    assert set(KINDS) == {"float32", "bfloat16"}
