"""Tokenizers of letters: for trainings of tiny models, and for models with another tokenizer."""

import copy

import torch
from models import VOCABULARY
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast


class Letters:
    """A tokenizer with one token per letter."""

    chat_template, bos_token_id, eos_token_id = None, 1, 0

    def __call__(self, text, **_):
        texts = [text] if isinstance(text, str) else text
        ids = [[2 + ord(letter) % (VOCABULARY - 2) for letter in each] for each in texts]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


def spelling(letters, *merges, spaced=False):
    """A tokenizer with a token a letter, in this order, and those of merged ones after them.

    If it is `spaced`, it puts a space before every text, as SentencePiece does.
    """
    words = [*letters, *map("".join, merges)]
    words = [word.replace(" ", "▁") if spaced else word for word in words]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [*merges]))
    made.decoder = decoders.Fuse()
    if spaced:
        steps = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
        made.normalizer = normalizers.Sequence([*steps])
        steps = decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        made.decoder = decoders.Sequence([*steps])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def letters_of(count):
    """An end of text, and letters; spaces are among them."""
    return ["<end>", *map(chr, range(32, 31 + count))]


def shuffled(model):
    """A copy of a model with its tokens in another order, its tokenizer before and after that."""
    letters = letters_of(model.config.get_text_config().vocab_size)
    order = torch.randperm(len(letters), generator=torch.Generator().manual_seed(3))
    other = copy.deepcopy(model)
    with torch.no_grad():
        heads = (other.get_input_embeddings(), other.get_output_embeddings())
        for weight in {id(each.weight): each.weight for each in heads}.values():
            weight.copy_(weight[order])
    return other, spelling(letters), spelling([letters[i] for i in order])
