"""Run files: what is read back, what is refused and how, and how runs continue after a kill."""

import copy
import json
import math

import pytest
import run_files as made

from layerskip.files.records import RunWriter, key_of, read_run, read_unfinished

PLAIN = {"name": "plain", "kind": "plain"}
HEADER = made.header(
    methods=[PLAIN, made.drafting("self")],
    law={"do_sample": False, "seed": 0},
    max_new_tokens=4,
)
RECORD = made.record(
    "self",
    "1",
    new_tokens=[4],
    seconds=made.seconds(1.0, 0.25, draft=0.25, verify=0.25, other=0.25),
    rounds=made.rounds((2, 1, 2), (1, 0, 1)),
    equal=[True],
)
SWEEP = made.sweep()
LINES = {"HEADER": HEADER, "RECORD": RECORD | {"repeat": 1}, "SWEEP": SWEEP}


def changed(line, **values):
    """A copy of the line; `a__b=1` sets what lies at a.b, and `...` removes it."""
    line = copy.deepcopy(line)
    for name, value in values.items():
        *path, last = name.split("__")
        inner = line
        for part in path:
            inner = inner[part]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
    return line


def save(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def test_what_is_written_is_read_back(path):
    plain = changed(RECORD, method="plain", rounds=None, equal=None)
    with RunWriter(path, HEADER, None) as writer:
        for line in (RECORD, SWEEP, plain):
            writer.write(line)
            assert path.read_text().endswith(json.dumps(line) + "\n")  # written at once
    run = read_run(path)
    assert run.header == HEADER
    assert run.records == (RECORD, plain)
    assert run.sweeps == (SWEEP,)  # older releases wrote these


def test_of_records_with_one_key_the_first_counts(path):
    later = changed(RECORD, seconds__total=2.0)
    save(path, HEADER, RECORD, later, changed(RECORD, repeat=1))
    assert [r["repeat"] for r in read_run(path).records] == [0, 1]
    assert read_run(path).records[0]["seconds"]["total"] == 1.0


REFUSED = {
    "HEADER": [
        ({"schema": 2}, "schema must be 1, got 2"),
        ({"kind": "record"}, "the first line must be a header, got kind 'record'"),
        ({"model__num_layers": ...}, "model.num_layers is missing"),
        ({"model__num_layers": 0}, "model.num_layers must be 1 or more, got 0"),
        ({"environment__cpu": "AMD"}, "environment.cpu must be a JSON object, got 'AMD'"),
        ({"environment__devices": 1}, "environment.devices must be a list, got 1"),
        ({"law__temperature": "1"}, "law.temperature must be a finite number, got '1'"),
        ({"repeats": -1}, "repeats must be 0 or more, got -1"),
        ({"law": {"do_sample": 1}}, "law.do_sample must be true or false, got 1"),
        ({"batch_sizes": [1, "2"]}, "batch_sizes[1] must be an integer"),
        ({"contexts": [0]}, "contexts[0] must be 1 or more, got 0"),
        ({"methods": [PLAIN] * 2}, "must have different names"),
        ({"methods": [PLAIN | {"low": {"bits": 8}}]}, "methods[0].low.attention is missing"),
        *(
            ({"methods": [PLAIN, made.drafting("self", **values)]}, f"methods[1].{words}")
            for values, words in (
                ({"label": 1}, "label must be a string, got 1"),
                ({"sources": "lookup"}, "sources must be a list, got 'lookup'"),
                ({"skipped": {"mlp": []}}, "skipped.attention is missing"),
                ({"num_kept": None}, "num_kept must be an integer, got None"),
                ({"costs": {"1": {}}}, "costs.'1'.draft is missing"),
                ({"costs": {"1": made.COSTS | {"verify": []}}}, "costs.'1'.verify must have at"),
            )
        ),
        ({"baseline": "other"}, "baseline must be one of the methods (plain, self), got 'other'"),
    ],
    "RECORD": [
        ({"kind": "header"}, "a second header: two runs in one file"),
        ({"kind": "words"}, "kind must be one of record, sweep, got 'words'"),
        ({"method": "other"}, "method must be one of the header's (plain, self), got 'other'"),
        ({"prompts": [1]}, "prompts[0] must be a string"),
        ({"batch_size": 0}, "batch_size must be 1 or more, got 0"),
        ({"batch_size": 2}, "prompts must have 2 items, got 1"),
        ({"new_tokens": [5]}, "must add up to new_tokens, 5; got 4"),
        ({"context": 0}, "context must be 1 or more, got 0"),
        ({"bytes_read": 0.0}, "bytes_read must be above 0, got 0.0"),
        ({"seconds__total": -1.0}, "seconds.total must be above 0, got -1.0"),
        ({"seconds__verify": ...}, "seconds.verify is missing"),
        ({"seconds__verify": 0.75}, "the parts of seconds must not exceed the total"),
        ({"rounds__accepted": [[3], [0]]}, "rounds.accepted and rounds.depths must not exceed"),
        ({"rounds__emitted": [[1], [1]]}, "must add up to new_tokens, 4; got 3"),
        ({"rounds__confidences": [[0.5]]}, "rounds.confidences[0][0] must be a list"),
        ({"rounds__sources": [0]}, "rounds.sources must have 2 items, got 1"),
        ({"rounds__sources": [None, 1]}, "one of the method's 1 sources, got 1"),
        ({"rounds__sources": [None, [1]]}, "one of the method's 1 sources, got 1"),
        ({"rounds__sources": [None, [0, 0]]}, "rounds.sources[1] must have 1 items, got 2"),
        ({"rounds__depths": [[3], [1]]}, "rounds.accepted and rounds.depths must not exceed"),
        ({"rounds__depths": [[0], [1]]}, "rounds.accepted and rounds.depths must not exceed"),
    ],
    "SWEEP": [
        ({"exits": []}, "exits must have at least 1 items, got 0"),
        ({"draft_lengths": [1]}, "exits[0].rounds must have 1 items, got 3"),
        ({"draft_lengths": ...}, "draft_lengths is missing"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "values", "words"), [(kind, *each) for kind, of in REFUSED.items() for each in of]
)
def test_lines_that_are_refused(path, kind, values, words):
    line = changed(LINES[kind], **values)
    save(path, *([line] if kind == "HEADER" else [HEADER, RECORD, line]))
    number = 1 if kind == "HEADER" else 3
    with pytest.raises(ValueError, match=f"{path.name}, line {number}: ") as error:
        read_run(path)
    assert words in str(error.value)


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_times_that_are_not_finite(path, number):
    line = json.dumps(RECORD).replace('"total": 1.0', f'"total": {number}')
    path.write_text(f"{json.dumps(HEADER)}\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2: .*finite"):
        read_run(path)
    with pytest.raises(ValueError, match="JSON compliant"), RunWriter(path, HEADER, None) as writer:
        writer.write(changed(RECORD, seconds__total=math.nan))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "are empty"),
        (b"\n\n", "are empty"),
        (b"hello\n", "line 1: not valid JSON"),
        (b"[1]\n", "line 1: a line must be a JSON object"),
        (b"\xff\xfe\n", "line 1: not "),
        (b"[" * 100_000 + b"\n", "line 1: "),
    ],
)
def test_files_that_are_none(path, content, words):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        read_run(path)


def test_files_that_cannot_be_read(path, tmp_path):
    with pytest.raises(ValueError, match=r"cannot read records .*No such file"):
        read_run(path)
    with pytest.raises(ValueError, match=r"cannot read records .*directory"):
        read_run(tmp_path)
    assert read_unfinished(path) is None


def test_a_line_in_the_middle_is_never_cut_off(path):
    whole = json.dumps(RECORD)
    path.write_text(f"{json.dumps(HEADER)}\n{whole[:-9]}\n{whole}\n")
    for read in (read_run, read_unfinished):
        with pytest.raises(ValueError, match="line 2: not valid JSON"):
            read(path)


# ---- Continuing ----


def test_a_run_cut_anywhere_goes_on(path):
    lines = [RECORD, SWEEP, changed(RECORD, repeat=1)]
    save(path, HEADER, *lines)
    data = path.read_bytes()
    breaks = [place for place, byte in enumerate(data) if byte == ord("\n")]
    near = {place + step for place in breaks for step in (-1, 0, 1, 2)}
    lengths = {*range(25), *range(0, len(data), 37), *near} - {len(data), len(data) + 1}
    for length in sorted(lengths):
        path.write_bytes(data[:length])
        if b"\n" not in (data[length - 1 : length], data[length : length + 1]) and length:
            if length <= breaks[0]:
                with pytest.raises(ValueError, match="there is no header"):
                    read_run(path)
            else:  # whole lines are read, and the cut is reported
                assert read_run(path).cut_off
        found = read_unfinished(path)
        kept = () if found is None else (*found.records, *found.sweeps)
        with RunWriter(path, changed(HEADER, created="later", argv=[]), found) as writer:
            keys = [key_of(record) for record in found.records] if found else []
            for line in lines:
                known = line in kept if line["kind"] == "sweep" else key_of(line) in keys
                if not known:
                    writer.write(line)
        run = read_run(path)
        assert run.records == (RECORD, changed(RECORD, repeat=1))
        assert run.sweeps == (SWEEP,)
        assert run.header["created"] == ("later" if found is None else HEADER["created"])


def test_what_is_no_run_is_not_written_over(path):
    for content in ("precious words", '{"some": "JSON"}', "precious\nwords"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"not a file of records|line 1: not valid JSON"):
            read_unfinished(path)
        assert path.read_text() == content


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_new_tokens": 8}, "max_new_tokens is 4 there and 8 here"),
        ({"model__hash": "f"}, "model.hash is '0123456789abcdef' there and 'f' here"),
        ({"law": {"do_sample": True, "seed": 0}}, "law.do_sample is False there and True here"),
        ({"law": {"do_sample": True, "seed": 1}}, "and 1 more"),
    ],
)
def test_a_run_of_other_settings_is_not_gone_on_with(path, values, words):
    save(path, HEADER, RECORD)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="other settings") as error:
        RunWriter(path, changed(HEADER, **values), read_unfinished(path))
    assert words in str(error.value)
    assert "--output" in str(error.value)
    assert path.read_bytes() == before


def test_what_may_differ_between_the_parts_of_a_run(path):
    save(path, HEADER, RECORD)
    told = {"created": "now", "argv": ["x"], "passes": "fused"}
    here = changed(HEADER, **told, environment__git__dirty=True)
    with RunWriter(path, here, read_unfinished(path)) as writer:
        writer.write(changed(RECORD, repeat=1))
    assert read_run(path).header == HEADER
    assert len(read_run(path).records) == 2
