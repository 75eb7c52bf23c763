"""From a name to a model: what loads, what is refused, and in which words."""

import json
import re

import pytest
import torch
from checkpoints import save_checkpoint, tiny_tokenizer
from models import prompt, tiny_model
from safetensors.torch import load_file, save_file

import layerskip
from layerskip.api.loading import DTYPES, encode, load
from layerskip.config.shipped import MADE, SHIPPED, SHIPPED_ASSISTANTS
from layerskip.config.skips import SkipConfig
from layerskip.families.wrappers import UnsupportedModelError, merge_adapter
from layerskip.texts.prompts import Prompt


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tmp_path / "tiny")


def test_a_folder_loads_ready_to_decode(folder):
    loaded = load(str(folder))
    assert not loaded.model.training
    assert loaded.model.dtype == torch.float32
    assert loaded.model.device == torch.device("cpu")
    assert loaded.folder == folder
    assert loaded.describe() == f"{folder}: 0.1M parameters, float32, cpu"
    original = tiny_model("llama", dtype=torch.float32)
    ids = prompt(5)
    assert torch.equal(loaded.model(ids).logits, original(ids).logits)


def test_dtype_auto_is_the_checkpoints_own(tmp_path):
    model = tiny_model("llama", dtype=torch.bfloat16)
    folder = str(save_checkpoint(tmp_path, model))
    assert load(folder).model.dtype == torch.bfloat16
    assert not any(weight.data_ptr() % 64 for weight in load(folder).model.parameters())
    assert load(folder, dtype="float32").model.dtype == torch.float32
    assert load(folder, dtype="float64").model.dtype == torch.float64


def test_the_skip_config_beside_the_checkpoint(folder):
    assert load(str(folder)).skip_config() is None
    SkipConfig.early_exit(2).save(folder / "layerskip.json")
    assert load(str(folder)).skip_config() == SkipConfig.early_exit(2)


def test_what_is_not_there(tmp_path, folder):
    for kind in ("empty", "lora"):
        (tmp_path / kind).mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    for name, words in [
        (str(tmp_path / "missing"), "there is no folder"),
        ("./missing", "there is no folder ./missing"),
        (str(tmp_path / "empty"), "holds no checkpoint: it has no config.json"),
        (str(tmp_path / "lora"), "holds no checkpoint: it is an adapter: serve its base"),
        (str(folder / "config.json"), "is a file; give a GGUF file, or"),
        (" ", "name is empty"),
        ("nobody/nothing", "cannot load model 'nobody/nothing' from the Hub"),
    ]:
        with pytest.raises(ValueError, match=words):
            load(name)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses an old name of the library
def test_an_adapter_is_merged(tmp_path, folder):
    peft = pytest.importorskip("peft")
    model = load(str(folder)).model
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    for name, weight in adapted.named_parameters():
        weight.data += 0.1 if "lora_B" in name else 0
    adapted.save_pretrained(tmp_path / "lora")
    want = adapted.eval()(torch.tensor([[5, 6, 7]])).logits
    merged = load(str(folder)).model
    merge_adapter(merged, tmp_path / "lora")
    torch.testing.assert_close(merged(torch.tensor([[5, 6, 7]])).logits, want)
    with pytest.raises(ValueError, match="cannot be merged into this model"):
        merge_adapter(tiny_model("llama", hidden_size=64), tmp_path / "lora")


def test_unknown_dtypes_and_devices(folder):
    with pytest.raises(ValueError, match=r"dtype must be one of auto, .*, got 'float8'"):
        load(folder, dtype="float8")  # a path, not a string
    for device in ("tpu", "cuda:99", "cpu:x", "meta"):
        with pytest.raises(ValueError, match=f"device must be auto or one .* got '{device}'"):
            load(str(folder), device=device)
    assert DTYPES[0] == "auto"


def test_an_unsupported_architecture_is_named_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    with pytest.raises(UnsupportedModelError, match="'rwkv' is not supported: it has a recurrent"):
        load(str(tmp_path))


@pytest.mark.parametrize("damage", ["weights", "cut", "config", "tokenizer", "one weight"])
def test_a_damaged_checkpoint_is_refused(folder, damage):
    weights = folder / "model.safetensors"
    if damage == "weights":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "config":
        (folder / "config.json").write_text("{")
    elif damage == "tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    else:
        tensors = load_file(weights)
        del tensors["model.layers.3.mlp.up_proj.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    words = "1 weight missing" if damage == "one weight" else "cannot load the checkpoint in"
    with pytest.raises(ValueError, match=words):
        load(str(folder))


def test_prompts_become_token_ids():
    tokenizer = tiny_tokenizer()
    assert encode(tokenizer, Prompt(id="1", text="w5 w7 w96")).tolist() == [[5, 7, 96]]
    for text in ("", " "):
        with pytest.raises(ValueError, match="prompt 1 is empty"):
            encode(tokenizer, Prompt(id="1", text=text))


def test_messages_need_a_chat_template():
    tokenizer = tiny_tokenizer()
    chat = Prompt(id="7", messages=({"role": "user", "content": "w5 w6"},))
    with pytest.raises(ValueError, match=r"prompt 7 has chat messages, .* no chat template"):
        encode(tokenizer, chat)
    tokenizer.chat_template = "{% for m in messages %}w9 {{ m.content }}{% endfor %} w10"
    assert encode(tokenizer, chat).tolist() == [[9, 5, 6, 10]]


def test_shipped_models_have_a_folder(monkeypatch, tmp_path):
    for name in SHIPPED + SHIPPED_ASSISTANTS:
        assert (layerskip.shipped(name) / "config.json").exists()
    with pytest.raises(ValueError, match=r"one of demo-llama, .*, got 'demo'"):
        layerskip.shipped("demo")
    monkeypatch.setattr("layerskip.config.shipped._MODELS", tmp_path)
    with pytest.raises(ValueError, match="demo-llama is missing from this installation"):
        load("demo-llama")


def test_made_checkpoints_are_found_from_anywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LAYERSKIP_CHECKPOINTS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in MADE:
        with pytest.raises(ValueError, match=rf"no folder {name} in checkpoints or .*make checkp"):
            load(name)
    own = save_checkpoint(tmp_path / "data/layerskip/checkpoints/smollm2")
    assert load("smollm2").folder == own
    named = save_checkpoint(tmp_path / "elsewhere/smollm2")
    monkeypatch.setenv("LAYERSKIP_CHECKPOINTS", str(named.parent))
    assert load("smollm2").folder == named
    monkeypatch.setenv("LAYERSKIP_CHECKPOINTS", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"no folder smollm2 in .*/none; "):
        load("smollm2")  # if a folder is named, no other is searched
    monkeypatch.delenv("LAYERSKIP_CHECKPOINTS")
    save_checkpoint(tmp_path / "checkpoints/smollm2")
    loaded = load("smollm2")
    assert loaded.folder is not None
    assert loaded.folder.resolve() == tmp_path / "checkpoints/smollm2"
    assert loaded.model.name_or_path == "smollm2"  # the name that a search would record
    save_checkpoint(tmp_path / "smollm2")
    assert str(load("smollm2").folder) == "smollm2"  # a folder of that name comes first


def test_wrong_names_suggest_the_nearest_right_one(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "mistral-tiny")
    monkeypatch.setenv("LAYERSKIP_CHECKPOINTS", str(tmp_path / "made"))
    with pytest.raises(ValueError, match=r"allowed are [^;]*demo-gemma4$"):
        load("smolm2")  # smollm2 is not made
    for name in MADE:
        (tmp_path / "made" / name).mkdir(parents=True)
    for name, meant in {
        "demo-lama": "demo-llama",
        "smolm2": "smollm2",
        "./gemma3-270": "gemma3-270m",
        str(tmp_path / "mistral-tony"): str(tmp_path / "mistral-tiny"),
    }.items():
        with pytest.raises(ValueError, match=rf"; did you mean {re.escape(meant)}\?$"):
            load(name)
    with pytest.raises(ValueError, match=r"there is no folder /nowhere/at/all$"):
        load("/nowhere/at/all")


def test_a_chat_template_may_refuse():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    chat = Prompt(id="7", messages=({"role": "system", "content": "w5"},))
    with pytest.raises(ValueError, match="rejects the messages of prompt 7: System role"):
        encode(tokenizer, chat)
