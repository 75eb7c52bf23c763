"""GGUF files as models: their numbers, every way to use them, and damaged files."""

import struct

import gguf
import numpy as np
import pytest
import torch
from commands import refused, run
from gguf_files import LARGE_GEMMA_4, YARN, write

from layerskip import LayerSkipDecoding, SkipConfig, fingerprint, generate, load
from layerskip.api.arguments import end_tokens
from layerskip.api.plan import open_plan
from layerskip.api.settings import Settings
from layerskip.bench import checks, suite
from layerskip.files.gguf_contents import read_gguf
from layerskip.model.opened_models import runs_natively
from layerskip.serving.openai_api import Served
from layerskip.weights.formats.gguf_architectures import ARCHITECTURES
from layerskip.weights.stored import Stored, stored_weights

native = pytest.mark.usefixtures("built")
DRAFTS = {
    "default": {},
    "an exit": {"skip": SkipConfig.early_exit(2)},
    "8 bits": {"skip": SkipConfig.low_precision(8)},
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write(path)
    return path


def text_of(model, ids, **settings):
    decoding = LayerSkipDecoding(**settings)
    out = model.generate(
        ids, custom_generate=decoding, max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    return out[0].tolist()


FILES = {kind: (kind, {}) for kind in [*ARCHITECTURES, "mistral", "mixtral", "olmo3"]}
FILES["a large gemma4"] = ("gemma4", LARGE_GEMMA_4)


@native
@pytest.mark.parametrize("name", FILES)
def test_texts_are_those_of_the_model_that_the_file_means(tmp_path, name):
    path, (kind, shape) = tmp_path / "model.gguf", FILES[name]
    plain = write(path, kind, tied=kind != "qwen3", seed=1, **shape)
    packed = load(str(path)).model
    matrices = [each for each, p in plain.named_parameters() if p.dim() == 2]
    apart = [
        each
        for each in matrices
        if "linear_attn" in each or "router" in each or "mlp.gate." in each
    ]
    natively = kind != "mistral3"
    assert runs_natively(packed) is natively
    assert len(stored_weights(packed)) == (len(matrices) - len(apart)) * natively
    ids = torch.arange(40, 52)[None]
    expected = plain.double().generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)
    for settings in ({"enabled": False}, *DRAFTS.values()):
        assert text_of(packed, ids, **settings) == expected[0].tolist()
    unpacked = load(str(path), packed=False, dtype="float64").model
    assert not stored_weights(unpacked)
    ours, theirs = unpacked.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[each], theirs[each]) for each in ours)


@native
def test_sampled_texts_are_those_of_plain_decoding(file):
    model = load(str(file), dtype="bfloat16").model
    ids = torch.arange(30, 40)[None]
    how = {"max_new_tokens": 24, "do_sample": True, "seed": 3}
    plain = generate(model, ids, enabled=False, **how)
    for settings in DRAFTS.values():
        assert torch.equal(generate(model, ids, **settings, **how).sequences, plain.sequences)


@native
def test_it_is_told_how_weights_are_stored_and_what_they_take(file):
    loaded = load(str(file))
    stored = stored_weights(loaded.model)
    matrices = [e for e in read_gguf(file).tensors.values() if len(e.shape) == 2]
    assert sum(each.bytes.nbytes for each in stored) == sum(each.nbytes for each in matrices)
    assert "weights as they are stored: " in loaded.describe()
    words = open_plan(loaded.model, Settings()).explain()
    assert "passes: native" in words
    assert "weights as they are stored: " in words
    assert "8 bits: its weights already take so few bits that 8 save too little" in words
    assert fingerprint(loaded.model) == fingerprint(load(str(file), packed=False).model)
    with pytest.raises(ValueError, match="load it with packed=False, or use execution='auto'"):
        generate(loaded.model, torch.ones(1, 3, dtype=int), max_new_tokens=2, execution="fused")


@native
@pytest.mark.usefixtures("priced")
@pytest.mark.parametrize(("command", "place"), [("check", checks), ("benchmark", suite)])
def test_weights_are_unpacked_once_for_the_library_if_memory_suffices(
    file, tmp_path, spied, sizes, monkeypatch, command, place
):
    sizes(draws=64)
    (tmp_path / "prompts.txt").write_text("abc\nxyz\n")
    flags = ["--prompts", tmp_path / "prompts.txt", "--max-new-tokens", "4"]
    asked, counts = spied(Stored, "unpacked", len), []
    for free in (None, 1 << 40):
        monkeypatch.setattr(place, "free_memory", lambda free=free: free)
        asked.clear()
        also = ["--method", "generate", "--output", tmp_path / f"{free}"] * (place is suite)
        done = run(command, str(file), *flags, *also)
        assert done.exit_code == 0, done.output
        assert ("no memory for a copy" in done.stderr) is (free is None and place is suite)
        counts.append(sum(rows > 99 for rows in asked))
    assert counts[0] > 3 * counts[1]


@pytest.mark.parametrize("kind", ["llama", "exaone4", "glm4"])
def test_frequencies_are_divided_by_the_factors_of_a_file(tmp_path, kind):
    plain = write(tmp_path / "model.gguf", kind)
    count = len(plain.model.rotary_emb.inv_freq)
    factors = np.linspace(1, 4, count, dtype=np.float32)
    changed = rewritten(tmp_path / "model.gguf", {"rope_freqs.weight": factors})
    made = load(str(changed)).model.model.rotary_emb.inv_freq
    assert torch.equal(made, plain.model.rotary_emb.inv_freq / torch.from_numpy(factors))


def test_factors_that_fit_no_frequencies_are_refused(file, tmp_path):
    for factors in (np.ones(5), np.zeros(32)):
        changed = rewritten(file, {"rope_freqs.weight": factors.astype(np.float32)})
        with pytest.raises(ValueError, match="must hold a positive number for each frequency"):
            load(str(changed))
    write(tmp_path / "model.gguf", "gemma3", num_hidden_layers=1)
    changed = rewritten(tmp_path / "model.gguf", {"rope_freqs.weight": np.ones(32, np.float32)})
    with pytest.raises(ValueError, match="must hold a positive number for each frequency"):
        load(str(changed))


def test_the_gemma_of_27b_scales_its_scores_by_the_width_of_its_states(tmp_path):
    shape = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 32}
    write(tmp_path / "model.gguf", "gemma2", ("Q8_0",), num_hidden_layers=46, **shape)
    assert load(str(tmp_path / "model.gguf")).model.config.query_pre_attn_scalar == 64


POSITIVE = "must be a positive number, got "
NO_MODELS = [
    ("embedding_length", 10**9, "is too small for gemma3.embedding_length = 1000000000"),
    ("attention.key_length", 10**9, "is too small for gemma3.attention.key_length = 1000000000"),
    ("attention.head_count", 8, "attn_q.weight has shape (256, 256), and the model that"),
    ("attention.head_count_kv", 0, f"{POSITIVE}0"),
    ("rope.freq_base", "x", f"{POSITIVE}'x'"),
    ("rope.freq_base", float("nan"), f"{POSITIVE}nan"),
    ("rope.scaling.factor", -2.0, f"{POSITIVE}-2.0"),
    ("rope.scaling.attn_factor", 1.5, "gemma3.rope.scaling.attn_factor = 1.5 is not supported"),
    ("attention.sliding_window_pattern", 3, "attention.sliding_window_pattern = 3 is not"),
    ("attention.causal", False, "attention.causal = False is not supported and may change"),
    ("block_count", 1.0, "does not describe a model: "),
    ("rope.scaling.type", "tomorrow", "rotary scaling 'tomorrow' in GGUF"),
    ("rope.scaling.yarn_beta_fast", 8.0, "gemma3.rope.scaling.yarn_beta_fast = 8.0 is not supp"),
    ("rope.dimension_count", 32, "rope.dimension_count other than the width"),
]


@pytest.mark.parametrize(("key", "value", "words"), NO_MODELS)
def test_numbers_that_describe_no_model_are_refused(tmp_path, key, value, words):
    write(tmp_path / "model.gguf", "gemma3", num_hidden_layers=1)
    changed = rewritten(tmp_path / "model.gguf", {}, **{f"gemma3.{key}": value})
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        load(str(changed))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


SCALED = {"none": {}, "linear": {"rope_type": "linear", "factor": 4.0}, "yarn": YARN}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_rotary_positions_are_scaled_as_the_file_says(tmp_path, kind):
    """Without a type a factor is linear, under its old name too."""
    shape = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 32, "head_dim": 32}
    shape |= {"rope_theta": 50_000.0}
    ids = torch.arange(40, 70)[None]
    files = {}
    for name, rope in SCALED.items():
        path = tmp_path / f"{name}.gguf"
        plain = write(path, kind, ("F32",), **shape, **({"rope_scaling": rope} if rope else {}))
        with torch.no_grad():
            files[name] = path, plain.double()(ids).logits
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_attn_factor": 1.2}
    for given, name in (
        ({"scaling.factor": 4.0}, "linear"),
        ({"scale_linear": 4.0}, "linear"),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, "linear"),
        ({"scaling.type": "none", "scaling.factor": 4.0}, "none"),
        ({"scaling.type": "linear"}, "none"),
        ({f"scaling.{key}": value for key, value in yarn.items()}, "yarn"),
    ):
        path, expected = files[name]
        said = {f"{kind}.rope.{key}": value for key, value in given.items()}
        model = load(str(rewritten(path, {}, **said)), packed=False, dtype="float64").model
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected), given
    assert not any(torch.equal(files["none"][1], files[name][1]) for name in ("linear", "yarn"))


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("gemma4", "attention.sliding_window_pattern", 2, "must say for each of 4 layers whether"),
        ("gemma4", "attention.key_length", 1 << 10, "must say which of 512 frequencies"),
        ("gemma4", "rope.scaling.factor", 2.0, "its rotary positions cannot be scaled"),
        ("granite", "rope.scaling.finetuned", False, "rope.scaling.finetuned = False is not supp"),
        ("mistral3", "rope.scaling.original_context_length", 0, "does not describe a model: "),
        ("phi3", "attention.head_count_kv", 3, "attn_qkv.weight has shape (512, 256), and the"),
        ("qwen3moe", "expert_count", 3, "ffn_gate_exps.weight has shape (4, 256, 256), and the"),
        ("qwen3moe", "expert_shared_count", 1, "qwen3moe.expert_shared_count = 1 is not supported"),
    ],
)
def test_what_an_architecture_lacks_is_refused(tmp_path, kind, key, value, words):
    write(tmp_path / "model.gguf", kind, ("F16",))
    changed = rewritten(tmp_path / "model.gguf", {}, **{f"{kind}.{key}": value})
    assert words in refused("generate", str(changed), "--prompt", "a")


def test_a_prediction_head_is_left_out(tmp_path):
    write(tmp_path / "model.gguf", "qwen35", ("F16",))
    more = {f"blk.4.{name}.weight": np.ones(4, np.float32) for name in ("attn_q", "nextn.eh_proj")}
    said = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    made = load(str(rewritten(tmp_path / "model.gguf", more, **said))).model
    assert len(made.model.layers) == made.config.num_hidden_layers == 4


def test_windows_of_gemma_3_are_those_of_the_file(tmp_path):
    """Without a size no layer has one. Layers with windows have a rotary base of their own."""
    shape = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 32, "head_dim": 32}
    ids = torch.arange(40, 70)[None]
    for own, key, value in (
        ({"layer_types": ["full_attention"] * 6}, "attention.sliding_window", None),
        ({"rope_local_base_freq": 77.0}, "rope.freq_base_swa", 77.0),
    ):
        plain = write(tmp_path / "file.gguf", "gemma3", ("F32",), rope_theta=5e4, **own, **shape)
        said = {"gemma3.rope.freq_base": 5e4, f"gemma3.{key}": value}
        path = rewritten(tmp_path / "file.gguf", {}, **said)
        model = load(str(path), packed=False, dtype="float64").model
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain.double()(ids).logits), key


def spelling(path, names, **metadata):
    """A copy of the file with names and types for its last tokens, and other metadata."""
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    tokens[len(tokens) - len(names) :] = names
    types = [1] * (len(tokens) - len(names)) + [*names.values()]
    said = {"tokens": tokens, "token_type": types, **metadata}
    return rewritten(path, {}, **{f"tokenizer.ggml.{name}": each for name, each in said.items()})


def test_a_turn_ends_a_text_though_eos_does_not_name_it(file, tmp_path):
    """Its token is not shown, even if the file does not mark it as special."""
    ids = torch.arange(40, 52)[None]
    plain = load(str(file)).model
    text = text_of(plain, ids, enabled=False)[12:]
    end = text.index(text[9])
    for said in (
        {"eot_token_id": text[9]},
        {"eom_token_id": text[9]},
        {"fim_pad_token_id": text[9]},
    ):
        path = spelling(file, {}, eos_token_id=0, **said)
        loaded = load(str(path))
        assert loaded.model.generation_config.eos_token_id == [0, text[9]]
        out = loaded.model.generate(ids, custom_generate=LayerSkipDecoding(), max_new_tokens=24)
        assert out[0, 12:].tolist() == text[: end + 1]
        assert loaded.tokenizer.decode(text[: end + 1], skip_special_tokens=True) == (
            loaded.tokenizer.decode(text[:end])
        )


NAMES = {"<|im_end|>": 4, "<\uff5cUser\uff5c>": 3, "</s>": 4, "<|endoftext|>": 3, "<think>": 4}


def test_ends_that_templates_use_by_name(file):
    """In `</s>` a file means an end only if it is a control token."""
    loaded = load(str(spelling(file, NAMES, eos_token_id=298, pre="qwen2")))
    assert loaded.model.generation_config.eos_token_id == [298, 295]
    tokenizer = loaded.tokenizer
    assert len(tokenizer) == 300
    text = "<\uff5cUser\uff5c>a<think></s><|im_end|>"
    assert tokenizer(text)["input_ids"] == [296, 64, 299, 297, 295]
    assert tokenizer.decode([296, 64, 299, 297, 295], skip_special_tokens=True) == "a<think></s>"
    assert end_tokens(loaded.model) == Served(loaded).ends == {295, 298}
    control = load(str(spelling(file, {**NAMES, "</s>": 3})))
    assert control.model.generation_config.eos_token_id == [295, 297, 298]
    with pytest.raises(ValueError, match="it has 300 tokens, and none is the end token 300"):
        load(str(spelling(file, {}, eot_token_id=300)))


SPLIT = [
    ("smollm", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġok"]),
    ("gpt-2", ["it", "'s", "Ġ1234", "ĊĊ", "Ġok"]),
    ("llama-bpe", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "Ġok"]),
    ("qwen2", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġok"]),
    ("tekken", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġok"]),
    ("qwen35", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġok"]),
    ("glm4", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "Ġok"]),
    ("hunyuan-dense", ["it", "'s", "Ġ", "123", "4", "ĊĊ", "Ġok"]),
    ("seed-coder", ["it", "'s", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġok"]),
    ("viking", ["it's", "Ġ", "1", "2", "3", "4", "ĊĊ", "Ġok"]),
    ("deepseek-llm", ["it", "'", "s", "Ġ", "1234", "Ċ", "Ċ", "Ġok"]),
    ("deepseek-coder", ["it", "'", "s", "Ġ", "1", "2", "3", "4", "Ċ", "Ċ", "Ġok"]),
    ("gpt-4o", ["it's", "Ġ", "123", "4", "ĊĊ", "Ġok"]),
    ("default", ["it", "'", "s", "Ġ", "123", "4", "ĊĊ", "Ġok"]),
]


@pytest.mark.parametrize(("pre", "pieces"), SPLIT)
def test_texts_are_split_as_the_file_says(file, pre, pieces):
    tokenizer = load(str(spelling(file, {"<s>": 3}, pre=pre, bos_token_id=299))).tokenizer
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234\n\n ok")
    assert [piece for piece, _ in split] == pieces
    begins = tokenizer("a")["input_ids"] == [299, 64]
    assert begins is (pre in ("llama-bpe", "tekken"))


def test_accents_belong_to_words_where_the_file_says_so(file):
    for pre, count in (("qwen2", 2), ("qwen35", 1)):
        tokenizer = load(str(spelling(file, {}, pre=pre))).tokenizer
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("oe\u0301e")
        assert len(split) == count


def test_a_splitting_that_is_not_known_is_refused_by_name(file):
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre = 'tomorrow' is not supported; load"):
        load(str(spelling(file, {}, pre="tomorrow")))
    with pytest.raises(
        ValueError, match=r"tokenizer.ggml.suppress_tokens = \[1\] is not supported"
    ):
        load(str(spelling(file, {}, suppress_tokens=[1])))


def test_a_space_is_put_in_front_as_the_file_says(file):
    how = {"model": "llama", "scores": [0.0] * 300, "merges": ["▁ a"]}
    for prefix, ids, text in ((True, [299, 299], "a a"), (False, [64, 299], "a a")):
        path = spelling(file, {"▁": 1, "▁a": 1}, add_space_prefix=prefix, **how)
        tokenizer = load(str(path)).tokenizer
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text


def test_what_changes_no_text_is_ignored(file):
    said = {"general.tags": ["a"], "general.sampling.temp": 0.5, "quantize.imatrix.file": "x"}
    said |= {
        "split.count": 0,
        "split.no": 0,
        "mradermacher.quantized_by": "m",
        "llama.vocab_size": 9,
    }
    said |= {"llama.expert_count": 0, "llama.rope.scaling.attn_factor": 1.0}
    said |= {"llama.attention.causal": True, "llama.rope.scaling.finetuned": True}
    said |= {"tokenizer.chat_templates": ["t"], "tokenizer.chat_template.t": "u"}
    said |= {"tokenizer.ggml.add_sep_token": False, "tokenizer.ggml.seperator_token_id": 3}
    load(str(rewritten(file, {}, **said)))


def test_a_part_of_a_split_file_says_so(file):
    part = rewritten(file, {}, **{"split.count": 2, "split.no": 1})
    words = refused("generate", str(part), "--prompt", "a")
    assert (
        "is part 2 of 2 of a split file; join the parts with llama.cpp's llama-gguf-split" in words
    )


def rewritten(path, more, *left_out, **metadata):
    """A copy of the file with other tensors and metadata (None: without), and fewer tensors."""
    made = path.with_name("changed.gguf")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(made, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in {"general.architecture", *metadata}:
            kind = field.types[0]
            of = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=of)
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if tensor.name not in {*more, *left_out}:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in more.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made


# ---- Damaged files: one line, and little memory ----

HEAD = struct.Struct("<4sIQQ")


def spoilt(file, kind, path):
    """Write a damaged copy of a file; returns words that the error must contain."""
    data = bytearray(file.read_bytes())
    magic, version, tensors, keys = HEAD.unpack_from(data)
    if kind.startswith("cut at "):
        del data[int(len(data) * float(kind.removeprefix("cut at "))) :]
        words = "it is empty" if not data else "is not a readable GGUF file: "
    elif kind == "magic":
        data[:4] = b"GGML"
        words = "its first four bytes are not GGUF"
    elif kind == "version":
        HEAD.pack_into(data, 0, magic, 3 << 24, tensors, keys)
        words = "its version must be 2 or 3"
    elif kind == "2^60 tensors":
        HEAD.pack_into(data, 0, magic, version, 1 << 60, keys)
        words = "it claims 1,152,921,504,606,846,976 tensors, more than its bytes can hold"
    elif kind == "2^60 keys":
        HEAD.pack_into(data, 0, magic, version, tensors, 1 << 60)
        words = "it claims 1,152,921,504,606,846,976 metadata keys"
    elif kind == "2^60 characters":
        struct.pack_into("<Q", data, HEAD.size, 1 << 60)
        words = "bytes of the name of a key, more than"
    else:
        entry = read_gguf(file).tensors["blk.0.attn_norm.weight"]
        at = data.index(struct.pack("<Q", len(entry.name)) + entry.name.encode()) + 8
        at += len(entry.name)  # then come dimensions, sizes, kind and offset
        place, value, words = {
            "2^31 dimensions": (0, struct.pack("<I", 1 << 31), "dimensions, more than 4"),
            "2^60 numbers": (4, struct.pack("<Q", 1 << 60), "it may be cut off"),
            "no numbers": (4, struct.pack("<Q", 0), "does not fit blocks"),
            "other numbers": (4, struct.pack("<Q", 224), "has shape (224,), and the model that"),
            "a kind that is not read": (12, struct.pack("<I", 10), "is in format Q2_K, which is"),
            "an unknown kind": (12, struct.pack("<I", 99), "is in format number 99, which is"),
            "beyond the file": (16, struct.pack("<Q", 1 << 62), "it may be cut off"),
        }[kind]
        data[at + place : at + place + len(value)] = value
    path.write_bytes(data)
    return words


@pytest.mark.parametrize(
    "kind",
    [
        *("cut at 0", "cut at 0.0001", "cut at 0.001", "cut at 0.01", "cut at 0.9"),
        *("magic", "version", "2^60 tensors", "2^60 keys", "2^60 characters"),
        *("2^31 dimensions", "2^60 numbers", "no numbers", "other numbers"),
        *("a kind that is not read", "an unknown kind", "beyond the file"),
    ],
)
def test_spoilt_files_are_refused_in_one_line(file, tmp_path, kind):
    path = tmp_path / "spoilt.gguf"
    words = spoilt(file, kind, path)
    assert words in refused("generate", str(path), "--prompt", "a")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["Q8_0", "Q4_1", "Q4_K", "Q6_K", "F16"])
def test_scales_that_are_not_finite_are_refused(tmp_path, form, value):
    path = tmp_path / "model.gguf"
    write(path, forms=(form,))
    entry = read_gguf(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    at = entry.offset + (208 if form == "Q6_K" else 0)
    data[at : at + 2] = np.float16(value).tobytes()
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"blk.1.ffn_down.weight holds numbers that are not fin"):
        load(str(path))


def test_files_of_other_models_are_refused(file):
    for named, words in (
        ("blk.2.ffn_up.weight", r"model.layers.2.mlp.up_proj.weight has no tensor"),
        ("token_embd.weight", "has no matrix token_embd.weight"),
    ):
        changed = rewritten(file, {}, named)
        with pytest.raises(ValueError, match=words):
            load(str(changed))
    more = {"blk.0.attn_gate.weight": np.ones((4, 4), dtype=np.float32)}
    with pytest.raises(ValueError, match=r"no weight is blk.0.attn_gate.weight"):
        load(str(rewritten(file, more)))
    other = rewritten(file, {}, **{"general.architecture": "mamba"})
    with pytest.raises(ValueError, match="'mamba' in GGUF is not supported; supported are llama"):
        load(str(other))


def test_a_weight_whose_rows_are_no_units_is_unpacked(tmp_path):
    path = tmp_path / "model.gguf"
    plain = write(path, hidden_size=48, forms=("F16", "F32"), intermediate_size=48, head_dim=12)
    model = load(str(path)).model
    assert not any(isinstance(each, Stored) for each in model.parameters())
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
