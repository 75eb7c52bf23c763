"""Pictures of prompts: read, checked, and encoded by a model's processor; no network is asked."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
PIXELS = 50_000_000  # of all pictures of a prompt
MOST = 16  # pictures of a prompt
Message = Mapping[str, Any]


def read_picture(data: bytes, pixels: int = PIXELS) -> Any:
    """A picture of PIL in RGB, the way up in which it was taken; of several frames the first.

    Raises:
        ValueError: it is none of `FORMATS`, damaged, or has more than so many pixels.
    """
    from PIL import Image, ImageOps

    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height <= pixels:  # else it would fill the memory
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # PIL raises whatever its decoders meet
        raise ValueError(f"this is no picture in {', '.join(FORMATS)} that can be read") from error
    raise ValueError(
        f"pictures of a prompt may have {pixels:,} pixels here, this one has {width} x {height}; "
        "send a smaller one"
    )


def pictures_in(addresses: Sequence[str]) -> list[Any]:
    """The pictures of a prompt, each in a data URL.

    Raises:
        ValueError: as of `read_picture`, there are too many, or one has another address.
    """
    if len(addresses) > MOST:
        raise ValueError(f"a prompt may have {MOST} pictures here, got {len(addresses)}")
    pictures, left = list[Any](), PIXELS
    for address in addresses:
        head, _, data = address.partition(",")
        if not (head.lower().startswith("data:") and head.lower().endswith(";base64")):
            raise ValueError(
                "pictures are sent as data URLs (data:image/png;base64,...), got "
                f"{address[:40]!r}; other addresses are not fetched"
            )
        try:
            held = base64.b64decode(data, validate=True)
        except ValueError as error:
            raise ValueError("the data URL of a picture is not in base64") from error
        pictures.append(picture := read_picture(held, left))
        left -= picture.width * picture.height
    return pictures


def showing(message: Message, pictures: Sequence[Any]) -> dict[str, Any]:
    """A message of text with pictures, if there are any, in front of it."""
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return {**message, "content": [*parts, *parts_of(message)] if parts else message["content"]}


def parts_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """What a message holds, in parts: texts and pictures of PIL."""
    content = message.get("content", "")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def pictures_shown(messages: Sequence[Message]) -> list[Any]:
    """The pictures in messages."""
    return [part["image"] for each in messages for part in parts_of(each) if "image" in part]


def encode_pictures(
    processor: Any, messages: Sequence[Message], pictures: Sequence[Any], **template: Any
) -> Any:
    """A conversation as the library's processor encodes it, with its pictures: a `BatchFeature`.

    Args:
        pictures: of PIL, those of all messages.
        template: what else the chat template is told.
    """
    # some templates know nothing but parts
    told = [{**each, "content": [*parts_of(each)]} for each in messages]
    how = {"add_generation_prompt": True, **template, "tokenize": False}
    text = processor.apply_chat_template(told, **how)
    begin = processor.tokenizer.bos_token
    has_it = begin is not None and text.startswith(begin)  # else the processor adds it
    special = {"add_special_tokens": False} if has_it else {}
    return processor(text=text, images=[[*pictures]], return_tensors="pt", **special)
