"""Reads and checks pictures of prompts; never accesses the network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
PIXELS = 50_000_000  # maximum for all pictures of a prompt together
MOST = 16  # maximum number of pictures in a prompt
Message = Mapping[str, Any]


def read_picture(data: bytes, pixels: int = PIXELS) -> Any:
    """Read a picture as a PIL image in RGB, upright; the first frame if there are several.

    Raises:
        ValueError: it is not in `FORMATS`, is damaged, or has more than `pixels` pixels.
    """
    from PIL import Image, ImageOps

    try:
        picture = Image.open(BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height <= pixels:  # a larger one might fill the memory
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # PIL passes on whatever its decoders raise
        raise ValueError(f"this is not a readable picture in {', '.join(FORMATS)}") from error
    raise ValueError(
        f"pictures of a prompt may have {pixels:,} pixels here, but this one has {width} x "
        f"{height}; send a smaller one"
    )


def pictures_in(addresses: Sequence[str]) -> list[Any]:
    """Decode the pictures of a prompt, each given as a data URL.

    Raises:
        ValueError: as for `read_picture`; there are too many, or an address is not a data URL.
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


def with_pictures(message: Message, pictures: Sequence[Any]) -> dict[str, Any]:
    """Put the pictures, if any, in front of the text of a message."""
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return {**message, "content": [*parts, *parts_of(message)] if parts else message["content"]}


def parts_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """The parts of a message: texts and PIL images."""
    content = message.get("content", "")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def pictures_of_messages(messages: Sequence[Message]) -> list[Any]:
    """The pictures in the messages."""
    return [part["image"] for each in messages for part in parts_of(each) if "image" in part]
