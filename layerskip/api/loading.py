"""Loads a model and its tokenizer by name, and encodes prompts."""

from __future__ import annotations

import json
import logging
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    enable_progress_bars,
)
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers import logging as chatter

from layerskip.config.shipped import (
    MADE,
    SHIPPED,
    SHIPPED_ASSISTANTS,
    available_models,
    model_folder,
    suggestion,
)
from layerskip.config.skips import SkipConfig
from layerskip.decoding.sources import drafter_of
from layerskip.families.known import ASSISTANTS, CONDITIONAL
from layerskip.families.wrappers import UnsupportedModelError
from layerskip.model.opened_models import runs_natively
from layerskip.model.whole import support
from layerskip.native import extension
from layerskip.texts.pictures import parts_of, pictures_of_messages
from layerskip.texts.prompts import Prompt
from layerskip.texts.tokens import plural
from layerskip.weights.formats.folders import folder_model, ignored_rounding, is_packed
from layerskip.weights.formats.gguf import gguf_model
from layerskip.weights.formats.gguf_tokenizer import gguf_tokenizer
from layerskip.weights.stored import Stored, storage_words, store_halves, unpacked_model

# transformers' default for an assistant whose checkpoint does not say how many tokens the library's
# own assisted generation should draft; it fails without one.
_LIBRARY_DRAFTS = 4
_SERVED = (torch.float32, torch.bfloat16)  # dtypes that native passes support
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Loaded:
    """A model ready to decode, its tokenizer and its folder."""

    name: str
    model: Any
    tokenizer: Any
    folder: Path | None
    """The checkpoint's folder, if it is on this machine."""

    def skip_config(self) -> SkipConfig | None:
        """Read the `layerskip.json` next to the checkpoint, if there is one."""
        path = None if self.folder is None else self.folder / "layerskip.json"
        if path is None or not path.exists():
            return None
        return replace(SkipConfig.load(path), model=None)  # it belongs to this model by its place

    @cached_property
    def processor(self) -> Any:
        """The processor that encodes prompts with pictures.

        Raises:
            ValueError: the model takes text only, or its processor cannot be loaded.
        """
        kind, place = self.model.config.model_type, self.folder or self.name
        if kind not in CONDITIONAL:
            raise ValueError(
                f"this model ({kind}) takes text only; pictures need {', '.join(CONDITIONAL)}"
            )
        try:
            return transformers.AutoProcessor.from_pretrained(place)
        except Exception as error:  # any error here is about the checkpoint
            reason = textwrap.shorten(str(error).replace(str(place), "it"), 300, placeholder=" ...")
            raise ValueError(f"the model's processor cannot be loaded: {reason}") from error

    def inputs(self, prompt: Prompt) -> dict[str, Tensor]:
        """The arguments of `layerskip.generate` for a prompt: token ids (1, T), and pictures.

        Raises:
            ValueError: as for `encode` and `processor`.
        """
        if pictures := pictures_of_messages(prompt.messages or ()):
            return dict(self.encode_pictures(prompt.messages or (), pictures))
        ids = encode(self.tokenizer, prompt).to(self.model.device)  # (1, T)
        # Without a mask, the library would treat a pad token in the prompt as padding.
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def encode_pictures(
        self, messages: Sequence[Any], pictures: Sequence[Any], **template: Any
    ) -> Any:
        """Encode a conversation and all its PIL images with the library's processor.

        Args:
            template: further arguments of the chat template.

        Raises:
            ValueError: as for `processor`, or the template or the processor rejects the messages.
        """
        processor = self.processor
        # Some templates accept only content in parts.
        in_parts = [{**each, "content": [*parts_of(each)]} for each in messages]
        how = {"add_generation_prompt": True, **template, "tokenize": False}
        begin = processor.tokenizer.bos_token
        try:
            text = processor.apply_chat_template(in_parts, **how)
            if begin is not None and text.startswith(begin):  # else the processor adds the token
                how = {"add_special_tokens": False}
            encoded = processor(text=text, images=[[*pictures]], return_tensors="pt", **how)
        except Exception as error:  # templates and processors raise errors of any kind
            raise ValueError(f"the model's chat template or processor refuses: {error}") from error
        return encoded.to(self.model.device, self.model.dtype)

    def store_halves(self, execution: str = "auto") -> bool:
        """Apply `store_halves` if native passes run the model; returns whether it did anything."""
        float32 = execution in ("auto", "native") and self.model.dtype is torch.float32
        return float32 and runs_natively(self.model) and store_halves(self.model)

    def describe(self) -> str:
        """Name, size, dtype and device in a few words."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        dtype = str(self.model.dtype).removeprefix("torch.")
        words = f"{self.name}: {parameters / 1e6:.1f}M parameters, {dtype}, {self.model.device}"
        stored = storage_words(self.model)
        return words if stored is None else f"{words}; {stored}"


def load(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    bars: bool = False,
    packed: bool = True,
    reads: bool = False,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Afterwards, transformers and the Hub only report errors.

    Args:
        name: one of `SHIPPED` or `MADE`, a local folder with a checkpoint (also a packed one:
            compressed-tensors, GPTQ, AWQ, FP8), a GGUF file, or a Hugging Face Hub id.
        device: a torch device; "auto" is the first CUDA device if there is one, else the CPU.
        dtype: one of `DTYPES`; "auto" is the checkpoint's own, but float32 for a shipped model on
            the CPU: it is small, and narrower types would only cause near-ties.
        trust_remote_code: run code that comes with the checkpoint.
        bars: show progress bars of downloads from the Hub.
        packed: keep weights of few bits as they are stored where native passes can run the model
            (on a CPU, in float32 or bfloat16); else they are unpacked.
        reads: also accept an encoder-decoder.

    Raises:
        ValueError: there is nothing by that name, the folder has no complete checkpoint, the dtype
            is unknown, or the device does not exist.
        UnsupportedModelError: this library does not support the architecture.
    """
    name = str(name)
    chatter.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    downloads = bars and not are_progress_bars_disabled()
    chatter.disable_progress_bar()  # the Hub's, too
    if downloads:
        enable_progress_bars()
    place = _device(device)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if dtype == "auto" and place.type == "cpu" and name in SHIPPED + SHIPPED_ASSISTANTS:
        dtype = "float32"
    if name.endswith(".gguf") and Path(name).is_file():
        return _load_gguf(Path(name), place, dtype, packed)
    folder = model_folder(name)
    source = name if folder is None else str(folder)
    options = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(source, **options)
        how, reason = ("whole", "") if trust_remote_code else support(config)
        if config.model_type in ASSISTANTS:
            how = "refused"
            reason = f"{name} drafts for a Gemma 4; load that, and give this one as --assistant"
        elif config.is_encoder_decoder and not reads and how != "refused":
            how = "refused"
            reason = f"{name} is an encoder-decoder: only layerskip generate, run and serve take it"
        if how == "refused":
            raise UnsupportedModelError(reason)
        # The library has two auto classes for models that continue text.
        causal = config.model_type not in CONDITIONAL or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto: Any = AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText
        auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else auto
        if is_packed(config) and how == "opened" and causal and place.type == "cpu":
            return _load_packed(name, folder, config, dtype, packed)
        loading = auto.from_pretrained(source, dtype=dtype, output_loading_info=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model, report = loading
    except UnsupportedModelError:
        raise
    except Exception as error:  # any error here is about the checkpoint
        raise _unreadable(name, folder, error) from error
    # transformers fills in missing weights with random numbers and only logs that.
    lacking = sorted([*report["missing_keys"], *map(str, report["mismatched_keys"])])
    if lacking:
        raise ValueError(
            f"checkpoint {name!r} is incomplete: {plural(len(lacking), 'weight')} missing or of "
            f"another shape, {lacking[0]} first"
        )
    model = _on_lines(model.to(place).eval())
    if folder is not None and name in SHIPPED + MADE:
        model.name_or_path = name  # as in its skip config, wherever it is installed
    return Loaded(name, model, tokenizer, folder)


def _unreadable(name: str, folder: Path | None, error: Exception) -> ValueError:
    reason = textwrap.shorten(str(error), 300, placeholder=" ...")
    if folder is not None:
        return ValueError(f"cannot load the checkpoint in {folder}: {reason}")
    return ValueError(
        f"cannot load model {name!r} from the Hub: {reason}; allowed are a Hub id, a local "
        f"folder, {', '.join(available_models())}{suggestion(name)}"
    )


def _on_lines(model: Any) -> Any:
    """Copy weights that a mapped file leaves unaligned to cache lines, which CPUs read slowly."""
    for weight in model.parameters():
        if isinstance(weight, Stored):
            weight.align_to_cache_lines()
        elif weight.device.type == "cpu" and weight.data_ptr() % 64:
            weight.data = weight.data.clone()
    return model


def _load_packed(name: str, folder: Path | None, config: Any, dtype: str, packed: bool) -> Loaded:
    """Load a packed checkpoint from a folder or the Hub onto the CPU.

    Activations are in float32 if the checkpoint's own dtype is float16.
    """
    there = folder or Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    own = config.dtype if config.dtype in _SERVED else torch.float32
    numbers = own if dtype == "auto" else getattr(torch, dtype)
    served = packed and numbers in _SERVED and extension.refusal() is None
    model: Any = folder_model(there, config, numbers, packed=served)
    if served and not runs_natively(model):
        model = unpacked_model(model)
    _on_lines(model).name_or_path = name
    tokenizer = AutoTokenizer.from_pretrained(there)
    rounded = ignored_rounding(config)
    if rounded is not None:
        warnings.warn(
            f"{name} also rounds {rounded}, which is ignored: its weights are read exactly, and "
            f"texts are those of {rounded} in {str(numbers).removeprefix('torch.')}",
            stacklevel=3,
        )
    return Loaded(name, model, tokenizer, folder)


def _load_gguf(path: Path, place: torch.device, dtype: str, packed: bool) -> Loaded:
    """Load a GGUF file. Activations default to float32, since the file does not name a dtype."""
    numbers = torch.float32 if dtype == "auto" else getattr(torch, dtype)
    packed = packed and place.type == "cpu" and numbers in _SERVED and extension.refusal() is None
    model: Any = gguf_model(path, numbers, packed=packed)
    if packed and not runs_natively(model):
        model = unpacked_model(model)
    try:
        tokenizer, ends = gguf_tokenizer(path)
    except Exception as error:  # any error here is about the file
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"{path} does not describe a readable tokenizer: {reason}") from error
    model.generation_config.eos_token_id = ends or None
    return Loaded(str(path), model if packed else model.to(place), tokenizer, None)


def load_official(name: str, like: Loaded) -> Loaded | None:
    """Load an official assistant or heads that draft, in the dtype and on the device of a model.

    Args:
        name: a local folder or a Hub id.
        like: the model.

    Returns:
        The assistant or head with the model's tokenizer; None for another kind of checkpoint.

    Raises:
        ValueError: there is nothing by that name, or the checkpoint is not complete.
    """
    if Path(name).is_file():
        return None
    folder = model_folder(name)
    source = name if folder is None else str(folder)
    try:
        read = drafter_of(source)
    except OSError as error:
        raise _unreadable(name, folder, error) from error
    if read is None:
        return None
    model = read(dtype=like.model.dtype).to(like.model.device)
    own = getattr(model, "generation_config", None)  # heads have none
    if own is not None and own.num_assistant_tokens is None:
        own.num_assistant_tokens = _LIBRARY_DRAFTS
    return Loaded(name, model, like.tokenizer, folder)


def encode(tokenizer: Any, prompt: Prompt) -> Tensor:
    """Encode a prompt as token ids, (1, T). Chat messages go through the chat template.

    Raises:
        ValueError: there is no chat template, it rejects the messages, there is no token, or the
            text has half a surrogate pair, as from bytes on a command line that are not UTF-8.
    """
    try:
        (prompt.text or json.dumps(prompt.messages, ensure_ascii=False, default=str)).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(
            f"prompt {prompt.id} contains half of a surrogate pair, U+{code:04X}, which is not a "
            "character; give UTF-8 text"
        ) from error
    if prompt.messages is not None:
        if not tokenizer.chat_template:
            raise ValueError(
                f"prompt {prompt.id} has chat messages, but this model's tokenizer has no chat "
                "template; give plain text as prompt, on the command line without --chat"
            )
        try:
            ids = tokenizer.apply_chat_template(
                list(prompt.messages), add_generation_prompt=True, return_dict=True
            )["input_ids"]
        except Exception as error:  # any error here is about the template
            raise ValueError(
                f"the model's chat template rejects the messages of prompt {prompt.id}: {error}; "
                "it may not allow a system message, or may require alternating roles"
            ) from error
    else:
        ids = tokenizer(prompt.text)["input_ids"] if prompt.text else []
    if not ids:
        raise ValueError(f"prompt {prompt.id} is empty; give at least one token")
    return torch.tensor([ids])  # (1, T)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        there += ["mps"] if torch.backends.mps.is_available() else []
        raise ValueError(
            f"device must be auto or one that this torch can use ({', '.join(there)}), got {name!r}"
        ) from error
    return device
