"""What is asked of transformers, with names as they are before release 5.24 and from it on."""

from functools import wraps

import pytest
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig

from layerskip import library


class Before(nn.Module):
    def forward(self, tokens, past_key_values=None, **more):
        return tokens


class From(Before):
    def forward(self, tokens, cache=None, **more):
        return tokens


class Renamed(Before):
    @wraps(From.forward)  # as deprecate_kwarg does, which still takes the old name
    def forward(self, *args, **kwargs):
        return From.forward(self, *args, **kwargs)


class Hidden(Before):
    def forward(self, *args, **kwargs):
        return args[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Before, "past_key_values"), (From, "cache"), (Renamed, "cache"), (Hidden, None)],
)
def test_the_cache_has_the_name_of_the_signature(kind, name):
    assert library.cache_name(kind()) == library.cache_name(kind.forward) == name


@pytest.mark.parametrize("name", library.CACHE_NAMES)
def test_a_cache_that_holds_tokens_is_found_under_each_name(name):
    cache = DynamicCache()
    assert library.cache_in({name: cache, "use_cache": True}) is cache
    assert not library.holds_tokens(cache)
    cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    assert library.holds_tokens(cache)
    assert not library.holds_tokens(library.cache_in({"use_cache": True}))


def test_a_pad_token_is_that_of_the_prepared_config():
    config = GenerationConfig(pad_token_id=3)
    assert library.pad_token(config) == 0  # not prepared
    config._pad_token_tensor = torch.tensor(3)
    assert library.pad_token(config) == 3
