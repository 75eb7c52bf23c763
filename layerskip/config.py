"""Skip configs: which sublayers a draft leaves out, and their JSON; knows no model and no torch.

A model of L layers is a sequence of 2L residual sublayers: attention of layer i has index 2i, its
MLP 2i + 1. Early exit (LayerSkip, arXiv 2404.16710) and sublayer skipping (Draft & Verify, arXiv
2309.08168) are both a set of indices left out. Only that set counts for equality and hash; the
model it was searched on, decoding options, costs and notes travel with it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal

from layerskip.files.schema import (
    POSITIVE,
    flag,
    has,
    integer,
    items,
    mapping,
    name_text,
    number,
    optional,
)
from layerskip.files.schema import parse as parse_json
from layerskip.files.writing import write_text

SCHEMA = 1
"""Version of the JSON that `SkipConfig.save` writes; `load` reads this and older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How to decode with a skip config; None leaves the choice to whoever decodes.

    Raises:
        TypeError, ValueError: a value has the wrong type or is out of range.
    """

    controller: str | None = None
    max_draft_length: int | None = None
    """Tokens drafted in a round at most, 1 or more."""
    threshold: float | None = None
    """Confidence in 0..1 below which a controller with a threshold stops drafting."""
    enabled: bool | None = None
    """False: decode plainly."""
    acceptance: Literal["coupled", "rejection"] | None = None
    draft_vocabulary: tuple[int, ...] | None = field(default=None, repr=False)
    """The only tokens that drafts may draw; a search writes the most frequent first. Drafts read no
    other rows of the head, and the text does not depend on it."""

    def __post_init__(self) -> None:
        optional(name_text)(self.controller, "controller")
        length = optional(integer(1))(self.max_draft_length, "max_draft_length")
        object.__setattr__(self, "max_draft_length", length)
        optional(number(0, 1))(self.threshold, "threshold")
        optional(flag)(self.enabled, "enabled")
        if self.acceptance not in (None, "coupled", "rejection"):
            raise ValueError(
                f"acceptance must be 'coupled' or 'rejection', got {self.acceptance!r}"
            )
        if self.draft_vocabulary is not None:
            tokens = _token_list("draft_vocabulary", self.draft_vocabulary)
            object.__setattr__(self, "draft_vocabulary", tokens)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SkipConfig:
    """The sublayers that a draft leaves out: attention and MLP sets, an early exit, or both.

    The sets hold layer indices from 0 and are kept sorted. `resolve(num_layers)` checks them
    against a model and writes the exit out as sets; compare resolved configs, so that an early
    exit equals the same sets written out. Leaving nothing out is legal (a draft that gains
    nothing).

    Raises:
        TypeError: an index is not an integer (bool and float are refused), or a field has the
            wrong type.
        ValueError: an index is negative or repeated, or a value is out of range.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    exit_layer: int | None = None
    """E: the draft runs layers 0..E-1 at most."""
    num_layers: int | None = field(default=None, compare=False)
    """L of the model this was made for, if known; `resolve` refuses another."""
    model: str | None = field(default=None, compare=False)
    """Hub id or name of the model this was searched on."""
    model_hash: str | None = field(default=None, compare=False)
    decoding: DecodingOptions | None = field(default=None, compare=False)
    costs: dict[str, Any] | None = field(default=None, compare=False)
    """A cost table, in target steps: `draft` is c, `verify[n - 1]` is v of n tokens."""
    notes: dict[str, Any] | None = field(default=None, compare=False)
    """What a search measured; any JSON."""

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            object.__setattr__(self, name, _index_set(name, getattr(self, name)))
        for name in ("exit_layer", "num_layers"):
            object.__setattr__(self, name, optional(integer(1))(getattr(self, name), name))
        optional(name_text)(self.model, "model")
        optional(name_text)(self.model_hash, "model_hash")
        if not isinstance(self.decoding, DecodingOptions | None):
            raise TypeError(f"decoding must be DecodingOptions, got {self.decoding!r}")
        optional(check_costs)(self.costs, "costs")
        optional(mapping)(self.notes, "notes")

    @classmethod
    def early_exit(cls, exit_layer: int) -> SkipConfig:
        """The draft runs layers 0..exit_layer-1, then norm and head."""
        return cls(exit_layer=exit_layer)

    @classmethod
    def layers(cls, indices: Iterable[int]) -> SkipConfig:
        """The draft leaves out whole layers: the attention and the MLP of each index."""
        indices = _index_set("layers", indices)
        return cls(attention=indices, mlp=indices)

    def resolve(self, num_layers: int) -> SkipConfig:
        """The canonical config for a model of `num_layers` layers: explicit sets, no exit.

        Raises:
            ValueError: an index or the exit lies outside the model, nothing is kept, or the config
                was made for another number of layers.
        """
        num_layers = integer(1)(num_layers, "num_layers")
        model = f"a {num_layers}-layer model"
        if self.num_layers not in (None, num_layers):
            raise ValueError(f"skip config is for a {self.num_layers}-layer model, got {model}")
        for name, layers in (("attention", self.attention), ("mlp", self.mlp)):
            if layers and layers[-1] >= num_layers:
                raise ValueError(
                    f"{name} indices must be in 0..{num_layers - 1} for {model}, got {layers[-1]}"
                )
        beyond_exit: frozenset[int] = frozenset()
        if self.exit_layer is not None:
            if self.exit_layer >= num_layers:
                raise ValueError(
                    f"exit_layer must be in 1..{num_layers - 1} for {model}, got {self.exit_layer}"
                )
            beyond_exit = frozenset(range(self.exit_layer, num_layers))
        attention = beyond_exit.union(self.attention)
        mlp = beyond_exit.union(self.mlp)
        if len(attention) + len(mlp) == 2 * num_layers:
            raise ValueError(f"a draft must keep at least one sublayer, got all of {model} skipped")
        return replace(
            self,
            attention=tuple(attention),
            mlp=tuple(mlp),
            exit_layer=None,
            num_layers=num_layers,
        )

    def skipped(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers left out, ascending: 2 * layer for attention, 2 * layer + 1 for MLP.

        `num_layers` may be left out where the config knows it, as a resolved one does.
        """
        resolved = self.resolve(self._depth(num_layers))
        attention = (2 * layer for layer in resolved.attention)
        return tuple(sorted([*attention, *(2 * layer + 1 for layer in resolved.mlp)]))

    def kept(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers that the draft runs, numbered as in `skipped`, ascending."""
        skipped = set(self.skipped(num_layers))
        return tuple(i for i in range(2 * self._depth(num_layers)) if i not in skipped)

    def shared_prefix(self, num_layers: int | None = None) -> int:
        """How many leading sublayers the draft runs unbroken; 2E for an early exit at E."""
        return next(iter(self.skipped(num_layers)), 2 * self._depth(num_layers))

    @property
    def draft_vocabulary(self) -> tuple[int, ...] | None:
        """The tokens that drafts can draw, of the decoding options; None: all."""
        return None if self.decoding is None else self.decoding.draft_vocabulary

    def bare(self) -> SkipConfig:
        """What drafts are made of, not when to draft: no costs, no option but the vocabulary."""
        options = DecodingOptions(draft_vocabulary=self.draft_vocabulary)
        return replace(self, decoding=options, costs=None)

    def matches(self, model: str | None, model_hash: str | None = None) -> bool | None:
        """Whether this was searched on that model: by hash where both are known, else by id.

        Hashes compare where they are of one kind, which their word in front says. None where there
        is nothing to compare.
        """
        if self.model_hash is not None and model_hash is not None:
            kinds = [each.rpartition("-")[0] for each in (self.model_hash, model_hash)]
            if kinds[0] == kinds[1]:
                return self.model_hash == model_hash
        if self.model is not None and model is not None:
            return self.model == model
        return None

    def warn_if_foreign(self, model: str | None, model_hash: str | None = None) -> None:
        """Warn where this was searched on another model than that, by name or hash."""
        if self.matches(model, model_hash) is False:
            warnings.warn(
                f"this skip config was searched on {self.model or 'another model'}, not on "
                f"{model}: the output stays exact, the speedup may be gone",
                stacklevel=2,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SkipConfig:
        """Read a file of `save`, or the bare sets published with Draft & Verify.

        Those are `{"attention": [...], "mlp": [...]}`, or several under names: then `path` ends
        in `#name`, as in `skip_layers.json#llama-2-13b`.

        Raises:
            ValueError: the file is missing, is not JSON, or is not a skip config; says which.
        """
        path, name = _split_name(Path(path))
        try:
            content = parse_json(path.read_bytes())
        except OSError as error:
            raise ValueError(f"cannot read skip config {path}: {error.strerror}") from error
        except ValueError as error:
            raise ValueError(f"skip config {path} is not valid JSON: {error}") from error
        try:
            return cls.from_dict(_choose(content, name))
        except (TypeError, ValueError) as error:
            raise ValueError(f"skip config {path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all.

        Raises:
            OSError: the folder cannot be written.
            TypeError, ValueError: `notes` or `costs` hold something that is not JSON.
        """
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"
        # a line for each list of numbers, however long: no string holds a line break
        text = re.sub(r"\[\n[^][{}\"]+\]", lambda found: _one_line(found[0]), text)
        write_text(path, text)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: schema version, sets, and whatever else is known."""
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        known |= {"attention": list(self.attention), "mlp": list(self.mlp)}
        if self.decoding is not None:
            options = asdict(self.decoding)
            if self.decoding.draft_vocabulary is not None:
                options["draft_vocabulary"] = list(self.decoding.draft_vocabulary)
            known["decoding"] = {k: v for k, v in options.items() if v is not None}
        return {"schema": SCHEMA} | {k: v for k, v in known.items() if v is not None}

    @classmethod
    def from_dict(cls, content: object) -> SkipConfig:
        """Read the JSON form; a missing schema version counts as 1.

        Raises:
            TypeError, ValueError: what is wrong, what is allowed, and what was found.
        """
        values = dict(mapping(content, "a skip config"))
        schema = integer(1)(values.pop("schema", 1), "schema")
        if schema > SCHEMA:
            raise ValueError(
                f"schema must be {SCHEMA} or lower, got {schema}: written by a newer layerskip"
            )
        _check_keys("a skip config", values, cls)
        if not values.keys() & {"attention", "mlp", "exit_layer"}:
            raise ValueError("a skip config must have attention, mlp or exit_layer, got none")
        if values.get("decoding") is not None:
            decoding = mapping(values["decoding"], "decoding")
            _check_keys("decoding", decoding, DecodingOptions)
            values["decoding"] = DecodingOptions(**decoding)
        return cls(**values)

    def __repr__(self) -> str:
        if self.exit_layer is not None and not self.attention and not self.mlp:
            return f"SkipConfig.early_exit({self.exit_layer})"
        if self.exit_layer is None and self.attention == self.mlp != ():
            return f"SkipConfig.layers({self.attention})"
        known = {"attention": self.attention, "mlp": self.mlp, "exit_layer": self.exit_layer}
        return f"SkipConfig({', '.join(f'{k}={v}' for k, v in known.items() if v)})"

    def _depth(self, num_layers: int | None) -> int:
        if num_layers is None:
            num_layers = self.num_layers
        if num_layers is None:
            raise ValueError("num_layers is not known: pass it, or resolve the skip config first")
        return num_layers


check_costs = has(draft=POSITIVE, verify=items(POSITIVE, least=1))
"""Check of a cost table, in whatever file it comes: c, and v from one token on."""


def _integers(name: str, what: str, each: str, values: object) -> list[int]:
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {what}, got {shown(values)}")
    return [integer()(value, each) for value in values]


def _index_set(name: str, values: object) -> tuple[int, ...]:
    indices = sorted(_integers(name, "layer indices", f"{name} index", values))
    for left, right in pairwise(indices):
        if left == right:
            raise ValueError(f"{name} indices must differ from each other, got {left} twice")
    return tuple(indices)


def _token_list(name: str, values: object) -> tuple[int, ...]:
    tokens = tuple(_integers(name, "token ids", f"a token of {name}", values))
    if not tokens:
        raise ValueError(f"{name} must hold 1 token or more, got none; leave it out to use all")
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise ValueError(f"{name} must hold no token twice, got {twice} again")
    return tokens


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("[ ", "[").replace(" ]", "]")


def _check_keys(name: str, values: dict[str, Any], allowed: type) -> None:
    known = [f.name for f in fields(allowed)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(
            f"{name} may have the keys {', '.join(known)}; got {', '.join(map(shown, unknown))}"
        )


def _split_name(path: Path) -> tuple[Path, str | None]:
    """`file.json#name` as path and name, unless a file is really called that."""
    stem, mark, name = path.name.rpartition("#")
    return (path.with_name(stem), name) if stem and mark and not path.exists() else (path, None)


def _choose(content: object, name: str | None) -> object:
    """The config itself, or the one called `name` of a file that holds several."""
    if (
        not isinstance(content, dict)
        or not content
        or any(
            not isinstance(value, dict) or value.keys() != {"attention", "mlp"}
            for value in content.values()
        )
    ):
        if name is not None:
            raise ValueError(f"holds one skip config without a name; leave out #{name}")
        return content
    if name not in content:
        choices = ", ".join(f"#{key}" for key in content)
        got = "no name" if name is None else f"#{name}"
        raise ValueError(f"holds several skip configs; end the path in one of {choices}; got {got}")
    return content[name]
