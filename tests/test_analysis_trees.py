"""Trees of drafts in reports: their counts, tokens a pass by size, and the picture of one."""

from dataclasses import replace

import pytest
import run_files as made

from layerskip.analysis import tables, trees
from layerskip.analysis.report import write_report
from layerskip.analysis.runs import Tree, load_runs, rounds_of

# text -> 1 -> 2 -> 5, 1 -> 3, text -> 4: taken 1 and 3
TREE = Tree([0, 1, 1, 0, 2], [1, 3], ["the", " cat", " dog", "a", "\n"])


def lines(words=True):
    """A run with a tree, a chain of the same size, and rounds without drafts."""
    told = made.rounds((5, 2, 3), (5, 0, 1), (0, 0, 1), (0, 0, 1))
    told |= {"parents": [[TREE.parents], [None], [None], [None]]}
    told |= {"taken": [[TREE.taken], [[]], [[]], [[]]]}
    if words:
        told |= {"drafts": [[TREE.words], [["x"] * 5], [[]], [[]]]}
    head = made.header(
        methods=[{"name": "plain", "kind": "plain"}, made.drafting("self", sources=["laws"])]
    )
    calls = [made.record("plain", new_tokens=[7]), made.record("self", new_tokens=[7], rounds=told)]
    return [head, *calls]


def run_of(tmp_path, *args):
    [run] = load_runs([made.write(tmp_path / "run.jsonl", lines(*args))])
    return run


def test_rounds_have_their_trees(tmp_path):
    run = run_of(tmp_path)
    first, second, *_ = rounds_of(run.records[1], 1, ["laws"])
    assert first.tree == replace(TREE, words=[*TREE.words[:4], "\\u000a"])
    assert TREE.depths == [0, 1, 2, 2, 1, 3]
    assert (first.depth, second.depth) == (3, 5)
    assert second.tree is None
    assert second.rejected
    assert not first.rejected  # nothing followed the last token that was taken
    assert first._replace(accepted=1, emitted=2, tree=Tree(TREE.parents, [1])).rejected
    assert first.steps == 0  # it was looked up


def test_tokens_a_pass_by_size(tmp_path):
    table = tables.sizes(run_of(tmp_path)).set_index("drafted")
    assert table["rounds"].to_dict() == {0: 2, 5: 2}
    assert table["tokens_per_pass"].to_dict() == {0: 1.0, 5: 2.0}
    assert table.loc[5, "branching"] == 0.5
    assert table.loc[5, "depth"] == 4.0
    assert table.loc[5, "accepted"] == 1.0


def test_positions_of_trees_go_by_depth(tmp_path):
    table = tables.positions(run_of(tmp_path)).set_index("position")
    assert table["reached"].to_dict() == {1: 2, 2: 2, 3: 2, 4: 1, 5: 1}
    assert table["accepted"].to_dict() == {1: 1, 2: 1, 3: 0, 4: 0, 5: 0}
    assert table["tried"].to_dict() == {1: 2, 2: 1, 3: 0, 4: 0, 5: 0}


@pytest.mark.parametrize("words", [True, False])
def test_the_picture_tells_what_was_drafted_and_taken(tmp_path, words):
    plot = trees.picture(run_of(tmp_path, words))
    taken = "the, dog" if words else "1, 3"
    assert f"5 tokens drafted, the longest path 3; taken: {taken}, and then" in plot.alt
    assert [text.xy[1] for text in plot.figure.axes[0].texts] == [0, 0, 0, 1, 2, 0]  # a line each
    drawn = {text.get_text() for text in plot.figure.axes[0].texts}
    want = {"text", "the", "cat", "dog", "a", "\\u000a"} if words else set("12345") | {"text"}
    assert drawn == want


def test_a_page_has_both_and_runs_without_trees_have_neither(tmp_path):
    file = made.write(tmp_path / "run.jsonl", lines())
    write_report([file], tmp_path / "report")
    page = (tmp_path / "report" / "index.html").read_text()
    for title in ("Tokens a pass by size", "A tree that was drafted", "Sizes of trees"):
        assert title in page
    assert {"sizes.svg", "tree.svg"} < {p.name for p in (tmp_path / "report/plots").iterdir()}
    [run] = load_runs([made.write(tmp_path / "other.jsonl", made.made_up())])
    assert trees.picture(run) is None
    assert not len(tables.sizes(run))
