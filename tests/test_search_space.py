"""The sets in a search space, their parameters, and the first sets to try."""

import json
from itertools import product

import pytest
from landscapes import masks_of
from optuna.distributions import CategoricalDistribution

from layerskip.config.skips import LowPrecision, SkipConfig, Trained
from layerskip.search.space import Space
from layerskip.search.warm_starts import WARM_STARTS, given, warm_starts


def space(kind="sublayer", num_layers=5, **options):
    return Space(kind=kind, num_layers=num_layers, **options)


ALL = [
    space(kind, num_layers, allow_ends=ends, bits=bits)
    for kind, num_layers, ends, bits in product(
        ("exit", "layer", "sublayer"), (1, 2, 3), (False, True), (None, 8)
    )
]
ALL += [
    space(kind, 2, allow_ends=True, bits=bits, windows=(64, 256), experts=experts)
    for kind, bits, experts in product(("layer", "sublayer"), (None, 8), ((), (2, 1, 0)))
]


@pytest.mark.parametrize("space", ALL, ids=str)
class TestEverySpace:
    def test_lists_what_it_counts_and_holds(self, space):
        masks = masks_of(space)
        assert len(masks) == len(set(masks)) == space.size
        most = 2 * space.num_layers if space.bits is None else 4 * space.num_layers + 2
        held = [
            mask for mask in range(-1, max(1 << most, 2 * max(masks, default=0))) if mask in space
        ]
        assert held == sorted(masks)

    def test_masks_parameters_and_configs_stand_one_to_one(self, space):
        seen = set()
        for mask in masks_of(space):
            params = space.params(mask)
            assert params.keys() == space.distributions.keys()
            assert space.from_params(params) == mask
            seen.add(tuple(params.items()))
            skip = space.skip_config(mask)
            assert skip == skip.resolve(space.num_layers)
            numbered = [skip.attention] * bool(space.windows) + [skip.mlp] * bool(space.experts)
            # where all of them are left out, the number means nothing, and is dropped
            if all(len(left_out) < space.num_layers for left_out in numbered):
                assert space.mask(skip) == mask
        assert len(seen) == space.size

    def test_holds_nothing_and_the_exits_but_not_all(self, space):
        assert 0 in space
        assert (1 << 2 * space.num_layers) - 1 not in space
        for exit_layer in range(1, space.num_layers):
            mask = space.exit_mask(exit_layer)
            assert mask == space.mask(SkipConfig.early_exit(exit_layer))
            assert mask in space

    def test_keeps_to_the_ends(self, space):
        for mask in masks_of(space):
            mask = space.left_out(mask)
            if not space.allow_ends:
                assert mask & 0b11 == 0
                assert mask >> 2 * space.num_layers - 2 in (0b00, 0b11)

    def test_first_sets_are_distinct_members(self, space):
        first = warm_starts(space, [1.0 + n % 3 for n in range(2 * space.num_layers)])
        assert all(mask in space and mask for mask in first.values())
        assert len(set(first.values())) == len(first) <= WARM_STARTS


def test_parameters_are_those_of_optuna():
    exits = CategoricalDistribution(("5", "4", "3", "2", "1"))
    assert space("exit").distributions == {"exit": exits}
    assert list(space("layer").distributions) == ["layer.1", "layer.2", "layer.3", "layer.4"]
    assert list(space("sublayer", 3).distributions) == ["attention.1", "mlp.1", "layer.2"]
    free = space("sublayer", 2, allow_ends=True).distributions
    assert list(free) == ["attention.0", "mlp.0", "attention.1", "mlp.1"]
    assert free["mlp.1"] == CategoricalDistribution((False, True))


def test_three_choices_a_sublayer():
    three = ("exact", "low", "out")
    found = space("sublayer", 3, bits=8).distributions
    assert found == {
        **dict.fromkeys(("attention.0", "mlp.0", "head"), CategoricalDistribution(three[:2])),
        **dict.fromkeys(("attention.1", "mlp.1", "layer.2"), CategoricalDistribution(three)),
    }
    exits = ("3", "2", "1", "3 low", "2 low", "1 low")
    assert space("exit", 3, bits=4).distributions == {"exit": CategoricalDistribution(exits)}
    assert space("exit", 3, bits=4).size == 6


def test_low_precision_as_masks():
    sets = space("sublayer", 3, bits=8)
    skip = SkipConfig(mlp=(1,), low=LowPrecision(attention=(0, 2), mlp=(2,)))
    mask = sets.mask(skip)
    assert mask == 0b1_110001_001000
    assert sets.skip_config(mask) == skip.resolve(3)
    assert sets.mask(SkipConfig.low_precision()) == sets.low_mask(0) == 0b1_111111_000000
    assert sets.low_mask(sets.exit_mask(1)) == 0b1_000011_111100
    with pytest.raises(ValueError, match="in 4 bits, not in 8"):
        sets.mask(SkipConfig.low_precision(4))
    assert 0b1_000100_000100 not in sets  # both skipped and rounded
    assert sets.mask(skip) not in space("sublayer", 3)


def test_drafts_that_are_in_no_space():
    trained = Trained(kind="heads", weights="draft.safetensors", hash="0" * 64, base="mine")
    low = space(num_layers=2, bits=8)
    numbers = space(num_layers=2, allow_ends=True, windows=(64, 256), experts=(2, 1, 0))
    exits = space("exit", 2, windows=(64,), experts=(1,))
    for where, skip, message in (
        (low, SkipConfig(low=LowPrecision(bits=4)), "it runs sublayers in 4 bits, not in 8"),
        (low, SkipConfig(low=LowPrecision(head=4)), "it runs the head in 4 bits, not in 8"),
        (low, SkipConfig(trained=trained), "it is a trained draft of kind heads; leave"),
        (numbers, SkipConfig(window=5), "it sees 5 slots, and the space has 64, 256 or all"),
        (numbers, SkipConfig(experts=5), "it runs 5 experts, and the space has 2, 1, 0 or all"),
        (exits, SkipConfig(window=64), "it sees 64 slots, and the space has all only"),
        (exits, SkipConfig(experts=1), "it runs 1 experts, and the space has all only"),
    ):
        with pytest.raises(ValueError, match=message):
            where.mask(skip)


def test_numbers_are_switches_with_a_bit_each():
    sets = space("exit", 3, vocabularies=(40, 10))
    assert list(sets.distributions) == ["exit", "vocabulary"]
    assert sets.size == 9
    masks = masks_of(sets)
    assert len(set(masks)) == 9
    assert sorted({sets.number("vocabulary", mask) or 0 for mask in masks}) == [0, 10, 40]
    assert sets.skip_config(masks[-1]) == sets.skip_config(masks[-1] & 0b111111)
    both = space("sublayer", 3, windows=(8,), vocabularies=(40,))
    mask = both.numbers["window"][8] | both.numbers["vocabulary"][40]
    assert both.params(mask)["window"] == "8"
    assert both.params(mask)["vocabulary"] == "40"
    assert json.loads(json.dumps(both.to_dict()))["vocabularies"] == [40]
    assert "window 8 or all, vocabulary 40 or all" in str(both)


def test_counts_a_large_space_without_listing_it():
    assert space("sublayer", 80, allow_ends=True).size == 2**160 - 1
    assert space("sublayer", 80).size == 2 ** (2 * 78 + 1)
    assert space("sublayer", 80, bits=8).size == 2 * 2**2 * 3 ** (2 * 78 + 1)


def test_first_sets_leave_out_what_matters_least():
    sets = space("sublayer", 12, bits=8)
    influence = [9.0 if sublayer % 3 else 0.1 * sublayer for sublayer in range(24)]
    first = {name: sets.skip_config(mask) for name, mask in warm_starts(sets, influence).items()}
    assert list(first)[:3] == ["8-bits", "8-bits-exit-6", "exit-6"]
    assert first["8-bits"] == SkipConfig.low_precision().resolve(12)
    assert first["8-bits-exit-6"] == SkipConfig(exit_layer=6, low=LowPrecision()).resolve(12)
    assert first["without-2"] == SkipConfig(attention=(3,), mlp=(1,)).resolve(12)
    assert first["8-bits-without-2"].rounded() == first["without-2"].kept()
    assert len(first) == WARM_STARTS
    many = space("sublayer", 12, bits=8, windows=(256, 1024))
    assert list(warm_starts(many, influence))[:3] == ["8-bits", "window-256", "window-1024"]


def test_published_sets_are_masks():
    skip = SkipConfig(attention=(1, 2), mlp=(3,))
    found = given(space(), {"file.json": skip, "exit": SkipConfig.early_exit(2)})
    assert found == {"file.json": 0b10010100, "exit": 0b1111110000}


def test_an_attention_whose_keys_others_read_is_left_out_by_an_exit_only():
    for kind in ("layer", "sublayer"):
        space = Space(kind=kind, num_layers=4, read=(1, 2), allow_ends=True)
        left_out = {
            layer for mask in masks_of(space) for layer in space.skip_config(mask).attention
        }
        assert left_out == {0, 3}
        assert {layer for m in masks_of(space) for layer in space.skip_config(m).mlp} == (
            {0, 3} if kind == "layer" else {0, 1, 2, 3}
        )
    exits = Space(kind="exit", num_layers=4, read=(1, 2))
    assert exits.exit_mask(1) in exits
    assert Space(**exits.to_dict()).size == 4
