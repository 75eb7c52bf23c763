"""Skip configs: resolution, numbering, equality, JSON, and every mistake that a file can hold."""

import inspect
import json
import pickle
from contextlib import suppress
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerskip import DecodingOptions, LayerSkipDecoding, LowPrecision, SkipConfig, Trained
from layerskip.decoding.sources.sublayer_draft import key_of

TRAINED = Trained(
    kind="heads", weights="/there/draft.safetensors", hash="0a" * 32, base="weights-0123abcd"
)
EVERYTHING = SkipConfig(
    attention=(3, 9),
    mlp=(4,),
    exit_layer=10,
    low=LowPrecision(bits=4, mlp=(9, 7), head=False),
    trained=TRAINED,
    num_layers=12,
    model="someone/some-llama",
    model_hash="0123abcd",
    decoding=DecodingOptions(
        controller="confidence",
        max_draft_length=6,
        threshold=0.6,
        adaptive={"alpha": 0.8, "beta2": 0.5},
        enabled=False,
        acceptance="rejection",
        lookup=True,
    ),
    costs={"draft": 0.25, "verify": [1.0, 1.1, 1.2]},
    notes={"trials": 40, "alpha": 0.8, "best": [1, 2]},
)


@st.composite
def resolvable(draw):
    """A config that keeps something, and a number of layers that it fits."""
    num_layers = draw(st.integers(2, 12))
    kept_layer = draw(st.integers(0, num_layers - 1))
    layers = st.sets(st.integers(0, num_layers - 1).filter(lambda layer: layer != kept_layer))
    exits = st.none() | st.integers(kept_layer + 1, num_layers - 1)
    exit_layer = draw(exits) if kept_layer + 1 < num_layers else None
    rounded = st.none() | st.sets(st.integers(0, num_layers - 1)).map(tuple)
    low = st.builds(
        LowPrecision,
        bits=st.sampled_from([8, 4]),
        attention=rounded,
        mlp=rounded,
        head=st.sampled_from([True, False, 8, 4]),
    )
    config = SkipConfig(
        attention=tuple(draw(layers)),
        mlp=tuple(draw(layers)),
        exit_layer=exit_layer,
        low=draw(st.none() | low),
        trained=draw(st.none() | st.just(TRAINED)),
    )
    return config, num_layers


@given(resolvable())
def test_kept_skipped_rounded_and_shared_sublayers(case):
    config, num_layers = case
    kept, skipped = config.kept(num_layers), config.skipped(num_layers)
    rounded, low, prefix = config.rounded(num_layers), config.low, config.shared_prefix(num_layers)
    assert sorted(kept + skipped) == list(range(2 * num_layers))
    chosen = []
    for sublayer in range(2 * num_layers):
        layer, is_mlp = divmod(sublayer, 2)
        beyond_exit = config.exit_layer is not None and layer >= config.exit_layer
        left_out = beyond_exit or layer in (config.mlp if is_mlp else config.attention)
        assert (sublayer in skipped) == left_out
        layers = () if low is None else low.mlp if is_mlp else low.attention
        if not left_out and (layers is None or layer in layers):
            chosen.append(sublayer)
    assert rounded == tuple(chosen)
    head = low is not None and low.head
    assert (config.resolve(num_layers).low is None) == (not rounded and not head)
    # the shared prefix is the longest unbroken exact start
    exact = set(kept) - set(rounded)
    assert kept[:prefix] == tuple(range(prefix))
    assert exact >= set(range(prefix))
    assert prefix not in exact


@given(resolvable())
def test_resolve_is_idempotent_and_configs_are_read_from_their_repr_and_json(case):
    config, num_layers = case
    resolved = config.resolve(num_layers)
    assert resolved.exit_layer is None
    assert resolved.num_layers == num_layers
    assert resolved.resolve(num_layers) == resolved
    assert resolved.skipped() == config.skipped(num_layers)
    sets = {name: getattr(resolved, name) for name in ("attention", "mlp", "low", "trained")}
    written_out = SkipConfig(**sets).resolve(num_layers)
    assert (written_out, hash(written_out)) == (resolved, hash(resolved))
    assert eval(repr(config)) == config
    assert eval(repr(resolved)) == resolved
    assert SkipConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("skip", "words"),
    [
        (SkipConfig(exit_layer=3, low=LowPrecision(bits=4)), "in 4 bits"),
        (SkipConfig(mlp=(1,), low=LowPrecision(head=False)), "in 8 bits, head exact"),
        (SkipConfig(low=LowPrecision(mlp=())), "4 of 8 sublayers in 8 bits, head in 8"),
        (SkipConfig(low=LowPrecision(bits=4, head=8)), "in 4 bits, head in 8"),
    ],
)
def test_low_precision_in_words(skip, words):
    resolved = skip.resolve(4)
    assert resolved.low.words(len(resolved.kept())) == words


def test_bare_keeps_what_drafts_are_made_of():
    options = DecodingOptions(controller="fixed", enabled=False, lookup=True, draft_vocabulary=(3,))
    bare = replace(EVERYTHING, decoding=options).bare()
    assert (bare, bare.costs) == (EVERYTHING, None)
    assert bare.decoding == DecodingOptions(lookup=True, draft_vocabulary=(3,))


def test_only_the_sets_count_for_equality():
    low = LowPrecision(bits=4, mlp=(7, 9), head=False)
    bare = SkipConfig(attention=(3, 9), mlp=(4,), exit_layer=10, low=low, trained=TRAINED)
    assert bare == EVERYTHING
    assert hash(bare) == hash(EVERYTHING)
    assert EVERYTHING.resolve(12).decoding == EVERYTHING.decoding


def test_frozen_and_picklable():
    with pytest.raises(AttributeError):
        EVERYTHING.attention = ()
    copy = pickle.loads(pickle.dumps(EVERYTHING))
    assert copy.to_dict() == EVERYTHING.to_dict()


def test_trained_weights_count_by_their_numbers_and_not_their_place(tmp_path):
    skip = SkipConfig(low=LowPrecision(bits=4), trained=TRAINED)
    moved = replace(skip, trained=replace(TRAINED, weights="elsewhere"))
    assert (moved, hash(moved)) == (skip, hash(skip))
    assert skip != replace(skip, trained=replace(TRAINED, hash="0b" * 32))
    assert skip != replace(skip, trained=None)
    assert skip.resolve(4).trained == skip.bare().trained == TRAINED
    assert skip.shared_prefix(4) == 0


def test_trained_weights_are_found_from_the_folder_of_the_config(tmp_path, monkeypatch):
    weights = tmp_path / "a" / "draft.safetensors"
    skip = SkipConfig(trained=replace(TRAINED, weights=str(weights)))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for folder, expected in [("a", "draft.safetensors"), ("b", "../a/draft.safetensors")]:
        path = tmp_path / folder / "skip.json"
        skip.save(path)
        assert json.loads(path.read_text())["trained"]["weights"] == expected
        assert SkipConfig.load(path).trained.weights == weights.as_posix()
    monkeypatch.chdir(tmp_path / "a")
    replace(skip, trained=replace(skip.trained, weights="draft.safetensors")).save("skip.json")
    assert SkipConfig.load("skip.json").trained.weights == weights.as_posix()


@pytest.mark.parametrize(
    ("searched_on", "asked", "expected"),
    [
        ((None, None), ("a", "h"), None),
        (("a", None), (None, "h"), None),
        (("a", None), ("a", "h"), True),
        (("a", None), ("b", None), False),
        (("a", "h"), ("b", "h"), True),
        (("a", "h"), ("a", "i"), False),
    ],
)
def test_matches_compares_hashes_before_ids(searched_on, asked, expected):
    model, model_hash = searched_on
    assert SkipConfig(model=model, model_hash=model_hash).matches(*asked) is expected


def test_file_round_trip_keeps_everything(tmp_path):
    path = tmp_path / "skip.json"
    EVERYTHING.save(path)
    loaded = SkipConfig.load(path)
    assert loaded == EVERYTHING
    assert loaded.to_dict() == EVERYTHING.to_dict()
    assert loaded.decoding == EVERYTHING.decoding
    content = json.loads(path.read_text())
    assert (content["schema"], content["low"]) == (3, {"bits": 4, "mlp": [7, 9], "head": False})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"schema": 3, "exit_layer": 3}', SkipConfig.early_exit(3)),
        ('{"schema": 3, "mlp": [1], "trained": null}', SkipConfig(mlp=(1,))),
        ('{"low": {"bits": 4, "head": true}}', SkipConfig.low_precision(4)),
        ('{"attention": [5, 3], "mlp": [6]}', SkipConfig(attention=(3, 5), mlp=(6,))),
        ('{"low": {"bits": 4, "head": 8}}', SkipConfig(low=LowPrecision(bits=4, head=8))),
    ],
)
def test_files_with_and_without_a_schema(tmp_path, text, expected):
    path = tmp_path / "skip.json"
    path.write_text(text)
    assert SkipConfig.load(path) == expected


def test_an_entry_of_a_file_of_several(tmp_path):
    path = tmp_path / "skip_layers.json"  # as Draft & Verify publishes them
    path.write_text(
        '{"llama-2-13b": {"attention": [3, 5], "mlp": [6]}, "llama-2-70b": {"attention": [10]}}'
    )
    expected = SkipConfig(attention=(3, 5), mlp=(6,))
    assert SkipConfig.load(path, entry="llama-2-13b") == expected
    with pytest.raises(ValueError, match="no entry 'llama'; the file has 'llama-2-13b', 'llama-2-"):
        SkipConfig.load(path, entry="llama")
    with pytest.raises(ValueError, match=r"holds several; choose with --entry .*'llama-2-13b', "):
        SkipConfig.load(path)
    SkipConfig.early_exit(3).save(path)
    with pytest.raises(ValueError, match="no entry 'llama': the file does not have"):
        SkipConfig.load(path, entry="llama")


def test_failed_save_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "skip.json"
    SkipConfig.early_exit(3).save(path)
    for notes, error in [({"x": {1, 2}}, TypeError), ({"x": float("nan")}, ValueError)]:
        with pytest.raises(error):
            replace(EVERYTHING, notes=notes).save(path)
    assert SkipConfig.load(path) == SkipConfig.early_exit(3)
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_save_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("layerskip.files.writing.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        EVERYTHING.save(tmp_path / "skip.json")
    assert list(tmp_path.iterdir()) == []


@given(
    st.binary(max_size=40) | st.text(alphabet='{}[]":,0123456789aemlptinoxschr_ ').map(str.encode)
)
def test_load_of_any_bytes_is_a_config_or_a_value_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    with suppress(ValueError):  # any other error is a fault
        SkipConfig.load(path)


def test_every_truncation_of_a_file_is_refused(tmp_path):
    path = tmp_path / "skip.json"
    EVERYTHING.save(path)
    whole = path.read_text().rstrip()
    for length in range(len(whole)):
        path.write_text(whole[:length])
        with pytest.raises(ValueError, match="not valid JSON"):
            SkipConfig.load(path)


@pytest.mark.parametrize(
    ("name", "number", "part", "wrong"),
    [("experts", 1, "mlp", (-1, True, 1.5)), ("window", 64, "attention", (0, -1, True, 1.5))],
)
def test_fewer_experts_or_keys_are_part_of_a_draft(name, number, part, wrong, tmp_path):
    fewer, whole = SkipConfig(**{name: number}), SkipConfig()
    assert fewer != whole
    assert hash(fewer) != hash(SkipConfig(**{name: number + 1}))
    assert key_of(fewer.resolve(4)) != key_of(whole.resolve(4))
    assert repr(fewer) == f"SkipConfig({name}={number})"
    for some in (fewer, SkipConfig(mlp=(2,), **{name: number + 2})):
        some.save(tmp_path / "skip.json")
        assert SkipConfig.load(tmp_path / "skip.json") == some
    (tmp_path / "skip.json").write_text(json.dumps({name: number}))
    assert SkipConfig.load(tmp_path / "skip.json") == fewer
    assert name not in whole.to_dict()
    # the prefix ends where the first sublayer of that part may differ from the model's
    assert fewer.shared_prefix(4) == (1 if part == "mlp" else 0)
    assert SkipConfig(attention=(0,), experts=1).shared_prefix(4) == 0
    # if the draft skips that part altogether, the number has no meaning
    none = SkipConfig(**{part: (0, 1)})
    assert replace(none, **{name: number}).resolve(2) == none.resolve(2)
    for value in wrong:
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            SkipConfig(**{name: value})


def test_the_signature_of_a_decoding_lists_every_option():
    listed = inspect.signature(LayerSkipDecoding).parameters
    assert {each.name for each in fields(DecodingOptions)} <= set(listed)
    assert not any(each.kind is each.VAR_KEYWORD for each in listed.values())
    assert "inputs_tensor" in inspect.signature(LayerSkipDecoding()).parameters  # of its call
