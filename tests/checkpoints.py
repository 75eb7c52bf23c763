"""Tiny checkpoints on disk: random ones, with one word per token, and a part of a shipped one."""

import functools
import tempfile

import torch
from models import VOCABULARY, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from layerskip.api.loading import load

_SHALLOW = tempfile.TemporaryDirectory()


def tiny_tokenizer():
    """Token i is the word `w<i>`; 0 is the pad token, and unknown words are 1."""
    words = ["<pad>", "<unk>", *(f"w{i}" for i in range(2, VOCABULARY))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


CHAT = "{% for m in messages %}w9 {{ m.content }} {% endfor %}w10"
"""A chat template that the tokenizer has words for."""


def save_checkpoint(folder, model=None, template=None):
    """Write a model (by default a float32 Llama, 6 layers, 256 positions) and the tokenizer."""
    if model is None:
        model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@functools.cache
def shallow_demo():
    """The folder of the demo Llama with 4 of its 24 layers, where what it says does not matter."""
    folder, loaded = f"{_SHALLOW.name}/demo-llama", load("demo-llama")
    loaded.model.model.layers = loaded.model.model.layers[:4]
    loaded.model.config.num_hidden_layers = 4
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder
