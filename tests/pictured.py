"""Conditional models with pictures in their prompts, and the inputs that a processor makes."""

import torch
import transformers
from models import TOWER, WINDOW, decoder_of, lively_model, prompt

from layerskip.costs.speculation import CostTable

COSTS = CostTable(0.1, (1.0, 1.01, 1.02))
NEW_TOKENS = 16
PLACEHOLDER = 96
LARGE = 16  # tokens of a picture that is larger than any window
assert LARGE > WINDOW

_CLIP = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
}
_GEMMA4 = {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 32}
_GEMMA4_IDS = {
    "boi_token_id": 90,
    "eoi_token_id": 91,
    "image_token_id": PLACEHOLDER,
    "video_token_id": 92,
    "boa_token_id": 93,
    "eoa_token_index": 94,
    "audio_token_id": 95,
}

# kind -> (configuration class, family of the text decoder)
KINDS = {
    "gemma3": ("Gemma3Config", "gemma3"),
    "gemma4": ("Gemma4Config", "gemma4"),
    "gemma4 two-way": ("Gemma4Config", "gemma4_dense"),
    "gemma4 unified": ("Gemma4UnifiedConfig", "gemma4_unified"),
    "llava": ("LlavaConfig", "llama"),
    "llava next": ("LlavaNextConfig", "mistral"),
    "mistral3": ("Mistral3Config", "ministral3"),
    "muse glimmer": ("MuseGlimmerConfig", "muse_glimmer"),
}
TWO_WAY = ("gemma3", "gemma4 two-way", "gemma4 unified")


def _values(kind, size):
    """The configuration of a conditional model apart from that of its decoder."""
    side = int(size**0.5)
    clip = transformers.CLIPVisionConfig(**_CLIP, image_size=4 * side, projection_dim=16)
    index = {"image_token_index": PLACEHOLDER}
    if kind == "gemma3":
        tower = _CLIP | {"patch_size": 2, "image_size": 4 * side, "vision_use_head": False}
        ids = {"mm_tokens_per_image": size, "boi_token_index": 90, "eoi_token_index": 91}
        return {"vision_config": transformers.SiglipVisionConfig(**tower), **ids, **index}
    if kind == "gemma4 unified":
        tower = transformers.Gemma4UnifiedVisionConfig(
            patch_size=4,
            pooling_kernel_size=1,
            mm_embed_dim=32,
            mm_posemb_size=16,
            output_proj_dims=32,
        )
        audio = transformers.Gemma4UnifiedAudioConfig(audio_embed_dim=16)
        return {"vision_config": tower, "audio_config": audio, **_GEMMA4_IDS}
    if kind.startswith("gemma4"):
        tower = transformers.Gemma4VisionConfig(**_CLIP, **_GEMMA4, pooling_kernel_size=2)
        return {"vision_config": tower, **_GEMMA4_IDS}
    if kind == "muse glimmer":
        ids = {"image_token_id": PLACEHOLDER, "video_token_id": 92}
        return {"vision_config": TOWER, "out_hidden_size": 64, "projector_hidden_size": 32, **ids}
    if kind == "mistral3":
        tower = transformers.PixtralVisionConfig(**_CLIP, image_size=8 * side)
        return {"vision_config": tower, "spatial_merge_size": 2, **index}
    grid = {"image_grid_pinpoints": [[4 * side, 4 * side]]} if kind == "llava next" else {}
    return {"vision_config": clip, "vision_feature_layer": -1, **grid, **index}


def conditional(kind, size=4, **overrides):
    """A lively decoder behind a random vision tower, whose pictures are `size` tokens."""
    config_class, family = KINDS[kind]
    text = lively_model(family, **overrides)
    how = {"text_config": decoder_of(text).config, **_values(kind, size)}
    config = getattr(transformers, config_class)(**how)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_(std=0.3)
    model.model.language_model, model.lm_head = decoder_of(text), text.lm_head
    model = model.to(text.dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _pixels(kind, size, number):
    """Random pictures in the form of a processor's output."""
    side, generator = int(size**0.5), torch.Generator().manual_seed(size)
    if kind.startswith("gemma4"):
        side *= 1 if kind == "gemma4 unified" else 2
        patches = torch.rand(number, side * side, 48, generator=generator)
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
        return {"pixel_values": patches, "image_position_ids": places.repeat(number, 1, 1)}
    if kind == "muse glimmer":
        patches = torch.rand(number * 4 * size, 96, generator=generator)
        return {
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([[1, 2 * side, 2 * side]] * number),
        }
    edge = {"mistral3": 8}.get(kind, 4) * side
    pixels = torch.randn(number, 3, edge, edge, generator=generator)
    sizes = torch.tensor([[edge, edge]] * number)
    if kind == "llava next":
        return {"pixel_values": pixels[:, None].repeat(1, 2, 1, 1, 1), "image_sizes": sizes}
    return {"pixel_values": pixels} | ({"image_sizes": sizes} if kind == "mistral3" else {})


def inputs_of(model, kind, lengths=(24, 18, 40), places=((3,), (), (0, 19)), size=4):
    """Left-padded prompts with pictures at the given places of each row, and the pictures."""
    width, number = max(lengths), sum(map(len, places))
    pixels = _pixels(kind, size, number)
    pixels["pixel_values"] = pixels["pixel_values"].to(model.dtype)
    tokens = size
    if kind == "llava next":  # has each picture a second time, with an end token on each line
        found = model.model.get_image_features(**pixels, return_dict=True).pooler_output
        tokens = len(found[0])
    ids = prompt(width, rows=len(lengths)).clamp(max=89)  # (B, W)
    types, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (length, begins) in enumerate(zip(lengths, places, strict=True)):
        mask[row, width - length :] = 1
        for begin in begins:
            first = width - length + begin
            types[row, first : first + tokens] = 1
    ids = (ids * mask).masked_fill(types.bool(), PLACEHOLDER)
    named = {"gemma3": "token_type_ids"}.get(kind, "mm_token_type_ids")
    own = {} if "gemma" not in kind else {named: types}
    return {"input_ids": ids, "attention_mask": mask, **pixels, **own}
