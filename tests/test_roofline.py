"""The limits that reading weights sets, against published sizes and speeds."""

from types import SimpleNamespace

import pytest

from layerskip.costs.roofline import DecoderShape


def shape(
    layers: int, width: int, mlp: int, heads: int, kv: int, dim: int, vocab: int
) -> DecoderShape:
    return DecoderShape(
        num_layers=layers,
        hidden_size=width,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        vocab_size=vocab,
    )


SHAPES = {
    "Llama-2-7B": shape(32, 4096, 11008, 32, 32, 128, 32000),
    "Llama-2-13B": shape(40, 5120, 13824, 40, 40, 128, 32000),
    "Llama-2-70B": shape(80, 8192, 28672, 64, 8, 128, 32000),
    "Llama-3.1-8B": shape(32, 4096, 14336, 32, 8, 128, 128256),
    "Llama-3.2-1B": shape(16, 2048, 8192, 32, 8, 64, 128256),
    "Llama-3.2-3B": shape(28, 3072, 8192, 24, 8, 128, 128256),
    "Gemma-2-2b": shape(26, 2304, 9216, 8, 4, 256, 256000),
    "Gemma-2-9b": shape(42, 3584, 14336, 16, 8, 256, 256000),
}

# layer's M parameters, attention % of it, head % of all, GB per token in bf16, c at L/4 and L/8,
# bound 1/c with half of the attention, half of the MLPs, half of both left out
TABLE = [
    ("Llama-2-7B", 202.4, 33.2, 2.0, 13.21, 0.265, 0.142, 1.19, 1.49, 1.96),
    ("Llama-2-13B", 317.2, 33.1, 1.3, 25.70, 0.260, 0.136, 1.20, 1.49, 1.98),
    ("Llama-2-70B", 855.6, 17.6, 0.4, 137.4, 0.253, 0.128, 1.10, 1.70, 1.99),
    ("Llama-3.1-8B", 218.1, 19.2, 7.0, 15.01, 0.303, 0.186, 1.10, 1.60, 1.87),
    ("Llama-3.2-1B", 60.8, 17.2, 21.3, 2.47, 0.409, 0.311, 1.07, 1.48, 1.65),
    ("Llama-3.2-3B", 100.7, 25.0, 12.3, 6.43, 0.342, 0.232, 1.12, 1.49, 1.78),
    ("Gemma-2-2b", 77.9, 18.2, 22.6, 5.23, 0.419, 0.322, 1.08, 1.46, 1.63),
    ("Gemma-2-9b", 198.2, 22.2, 9.9, 18.48, 0.324, 0.212, 1.11, 1.54, 1.82),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_sizes_of_known_models(row: tuple[str, *tuple[float, ...]]) -> None:
    name, layer, attention, head, gigabytes, quarter, eighth, *bounds = row
    model = SHAPES[name]
    whole = model.attention + model.mlp
    layers = model.num_layers
    assert whole / 1e6 == pytest.approx(layer, abs=0.06)
    assert 100 * model.attention / whole == pytest.approx(attention, abs=0.06)
    assert 100 * model.head / model.weights == pytest.approx(head, abs=0.06)
    assert 2 * model.weights / 1e9 == pytest.approx(gigabytes, rel=0.001)
    for part, cost in ((4, quarter), (8, eighth)):
        below, rest = divmod(layers, part)  # the published numbers divide layers, too
        between = (model.draft_cost(below), model.draft_cost(below + 1))
        share = rest / part
        assert (1 - share) * between[0] + share * between[1] == pytest.approx(cost, abs=0.001)
    half = layers // 2
    costs = [model.draft_cost(*kept) for kept in ((half, layers), (layers, half), (half, half))]
    assert [1 / cost for cost in costs] == pytest.approx(bounds, abs=0.008)


def test_a_trimmed_head_cheapens_the_draft_of_a_small_model() -> None:
    model = SHAPES["Llama-3.2-1B"]
    assert model.draft_cost(4) == pytest.approx(0.41, abs=0.005)
    assert model.draft_cost(4, head_fraction=0.25) == pytest.approx(0.25, abs=0.005)
    assert model.draft_cost(16) == 1.0


def test_keys_and_values() -> None:
    model = SHAPES["Llama-3.1-8B"]
    assert model.kv_bytes(1) == 128 * 1024
    assert model.kv_bytes(1, bytes_per_value=4) == 2 * model.kv_bytes(1)


def test_gpt_fast_reads_little_beyond_the_weights() -> None:
    """Its README, A100-80GB: 1397.31 GB/s were reached at 104.9 tokens per second."""
    computed = 2 * SHAPES["Llama-2-7B"].weights / 1e9
    assert 1.0 < 1397.31 / 104.9 / computed < 1.01


def test_sizes_from_a_configuration() -> None:
    config = SimpleNamespace(
        num_hidden_layers=24,
        hidden_size=192,
        intermediate_size=512,
        num_attention_heads=3,
        vocab_size=2048,
    )
    plain = DecoderShape.from_config(config)
    assert (plain.num_kv_heads, plain.head_dim) == (3, 64)
    config.num_key_value_heads, config.head_dim = 1, 32
    assert DecoderShape.from_config(config).attention == 2 * 192 * 32 * 4
