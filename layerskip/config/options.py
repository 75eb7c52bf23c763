"""How to decode with a draft: the table of which files, settings and flags are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as shown
from typing import Any, Literal

from layerskip.config.registry import ADAPTIVE
from layerskip.files import schema
from layerskip.files.schema import Check, checked, flag, integer, mapping, name_text, number


def _option(check: Check, words: str, *named: str | None, **limits: Any) -> Any:
    """An option that commands show as a flag.

    Args:
        words: its help.
        named: its metavar, and other names than `--` and its own.
        limits: further arguments of `typer.Option`.
    """
    return checked(check, flag=((words, *named), limits))


def _adaptive(value: Any, name: str) -> dict[str, float]:
    for each, part in mapping(value, name).items():
        if each not in ADAPTIVE:
            raise ValueError(f"adaptive may have {', '.join(ADAPTIVE)}; got {shown(each)}")
        number(0, 1)(part, f"adaptive {each}")
    return dict(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How to decode with a skip config. None leaves a choice to the caller or the defaults.

    The words of an option are its help; `LayerSkipDecoding` says more.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """

    controller: str | None = _option(
        name_text, "How to set the draft length.  [default: expected-gain]"
    )
    max_draft_length: int | None = _option(
        integer(1), "Draft at most N tokens per round.", "N", min=1
    )
    threshold: float | None = _option(
        number(0, 1),
        "Stop drafting below this confidence. Only for controllers with a threshold.",
        "P",
        min=0,
        max=1,
    )
    adaptive: Mapping[str, float] | None = _option(
        _adaptive,
        "Some or all settings of adaptive-threshold: "
        + ",".join(f"{name}={value}" for name, value in ADAPTIVE.items())
        + ".",
        "LIST",
    )
    classifier: str | None = _option(
        name_text, "A classifier of drafted tokens, for the controller disco.", "FILE"
    )
    """The file of a classifier that stops drafts (see `layerskip.research.disco`)."""
    enabled: bool | None = checked(flag)
    """False: decode plainly."""
    acceptance: Literal["coupled", "rejection", "spectr"] | None = _option(
        schema.one_of("coupled", "rejection", "spectr"),
        "Acceptance rule for drafts when sampling.  [default: coupled]",
    )
    draft_vocabulary: tuple[int, ...] | None = checked(schema.token_list, repr=False)
    """The only tokens that drafts may use; a search lists the most frequent first. Drafts read no
    other rows of the head. The text does not depend on this set."""
    lookup: bool | None = _option(
        flag,
        "Also draft the tokens that followed the same words earlier in the text.  [default: on, "
        "unless the skip config says no]",
        None,
        "--lookup/--no-lookup",
    )
    remember: str | None = _option(
        name_text,
        "Also draft what earlier answers held: memory (until the command ends), shared (in serve, "
        "between API keys, too), off, or a folder, where they are kept.  [default: memory in chat "
        "and run, else off]",
        "WHERE",
    )
    remember_tokens: int | None = _option(
        integer(100),
        "Remember at most N tokens; the oldest answers go first.  [default: 100000]",
        "N",
        min=100,
    )
    branches: bool | None = _option(
        flag,
        "Also verify second-best draft tokens where that is expected to pay.  [default: from the "
        "skip config]",
        None,
        "--branches/--no-branches",
    )

    def __post_init__(self) -> None:
        schema.check_fields(self)
