"""Skip configs: which parts of a model a draft leaves out or rounds, and their JSON form.

A model of L layers is a sequence of 2L residual sublayers: attention of layer i has index 2i, its
MLP 2i + 1. Early exit (LayerSkip, arXiv 2404.16710) and sublayer skipping (Draft & Verify, arXiv
2309.08168) are both a set of indices left out; of the others, a draft runs each exactly or in low
precision. A draft may also see less of the text than the model does, and compute with trained
weights of its own (`Trained`), which lie in a file beside this one. Only these choices count for
equality and hash; the model they were searched on, decoding options, costs and notes travel with
them.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal

from layerskip.draft_weights import LowPrecision, Trained
from layerskip.files import schema
from layerskip.files.reading import read_file
from layerskip.files.schema import flag, has, integer, mapping, name_text, number, optional, version
from layerskip.files.writing import write_text
from layerskip.registry import ADAPTIVE

__all__ = ["SCHEMA", "DecodingOptions", "LowPrecision", "SkipConfig", "Trained", "check_costs"]

SCHEMA = 3
"""Version of the JSON that `SkipConfig.save` writes, and the only one that `load` reads."""

SINK = 4
"""The first slots of a text, which drafts with a window see, too: much attention goes there
(StreamingLLM, arXiv 2309.17453)."""


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
    adaptive: Mapping[str, float] | None = None
    """Parameters of `adaptive-threshold`, all or some of `registry.ADAPTIVE`, in 0..1 each."""
    enabled: bool | None = None
    """False: decode plainly."""
    acceptance: Literal["coupled", "rejection"] | None = None
    draft_vocabulary: tuple[int, ...] | None = field(default=None, repr=False)
    """The only tokens that drafts may draw; a search writes the most frequent first. Drafts read no
    other rows of the head, and the text does not depend on it."""
    lookup: bool | None = None
    """Whether drafts are also looked up in the row's own history."""
    branches: bool | None = None
    """Whether second-best tokens are verified, too, where they are expected to pay."""

    def __post_init__(self) -> None:
        optional(name_text)(self.controller, "controller")
        length = optional(integer(1))(self.max_draft_length, "max_draft_length")
        object.__setattr__(self, "max_draft_length", length)
        optional(number(0, 1))(self.threshold, "threshold")
        for name, value in (optional(mapping)(self.adaptive, "adaptive") or {}).items():
            if name not in ADAPTIVE:
                raise ValueError(f"adaptive may have {', '.join(ADAPTIVE)}; got {shown(name)}")
            number(0, 1)(value, f"adaptive {name}")
        for name in ("enabled", "lookup", "branches"):
            optional(flag)(getattr(self, name), name)
        if self.acceptance not in (None, "coupled", "rejection"):
            raise ValueError(
                f"acceptance must be 'coupled' or 'rejection', got {self.acceptance!r}"
            )
        if self.draft_vocabulary is not None:
            tokens = schema.token_list(self.draft_vocabulary, "draft_vocabulary")
            object.__setattr__(self, "draft_vocabulary", tokens)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SkipConfig:
    """The sublayers that a draft leaves out, and those of the others that it rounds.

    Left out are attention and MLP sets, all from an early exit on, or both; `low` says what runs in
    low precision. Sets hold layer indices from 0 and are kept sorted. `resolve(num_layers)` checks
    them against a model and writes the exit and `low` out as sets; compare resolved configs, so
    that an early exit equals the same sets written out. Choosing neither for any sublayer is legal
    (a draft that gains nothing).

    Raises:
        TypeError: an index is not an integer (bool and float are refused), or a field has the
            wrong type.
        ValueError: an index is negative or repeated, or a value is out of range.
    """

    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    exit_layer: int | None = None
    """E: the draft runs layers 0..E-1 at most."""
    low: LowPrecision | None = None
    """Which kept sublayers, and whether the head, run in low precision; None: none."""
    trained: Trained | None = None
    """Weights trained for this draft, healed ones for what `low` rounds; None: the model's own."""
    experts: int | None = None
    """Of a mixture of experts, how many the draft runs for a token; 0: only the dense MLP that runs
    beside them (Gemma 4); None: as many as the model."""
    window: int | None = None
    """Of the text, how many of the last slots the draft's attention sees, its own token's included.
    Layers with full attention see the first SINK slots, too; layers whose own sliding window is no
    larger stay as they are. None: as much as the model."""
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
            object.__setattr__(self, name, schema.index_set(getattr(self, name), name))
        smallest = {"exit_layer": 1, "num_layers": 1, "experts": 0, "window": 1}
        for name, least in smallest.items():
            object.__setattr__(self, name, optional(integer(least))(getattr(self, name), name))
        if not isinstance(self.low, LowPrecision | None):
            raise TypeError(f"low must be LowPrecision, got {self.low!r}")
        if not isinstance(self.trained, Trained | None):
            raise TypeError(f"trained must be Trained, got {self.trained!r}")
        if self.trained is not None and not self.trained.module and self.low is None:
            raise ValueError("healed weights correct what low rounds, and low rounds nothing")
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
        indices = schema.index_set(indices, "layers")
        return cls(attention=indices, mlp=indices)

    @classmethod
    def low_precision(cls, bits: Literal[8, 4] = 8) -> SkipConfig:
        """The draft runs everything, the head too, with weights rounded to so many bits."""
        return cls(low=LowPrecision(bits=bits))

    def resolve(self, num_layers: int) -> SkipConfig:
        """The canonical config for a model of `num_layers` layers: explicit sets, no exit.

        `low` holds no sublayer that is left out, and is None where nothing is rounded.

        Raises:
            ValueError: an index or the exit lies outside the model, nothing is kept, or the config
                was made for another number of layers.
        """
        num_layers = integer(1)(num_layers, "num_layers")
        model = f"a {num_layers}-layer model"
        if self.num_layers not in (None, num_layers):
            raise ValueError(f"skip config is for a {self.num_layers}-layer model, got {model}")
        sets = {"attention": self.attention, "mlp": self.mlp}
        if self.low is not None:
            sets |= {"low attention": self.low.attention or (), "low mlp": self.low.mlp or ()}
        for name, layers in sets.items():
            if layers and layers[-1] >= num_layers:
                raise ValueError(
                    f"{name} indices must be in 0..{num_layers - 1} for {model}, got {layers[-1]}"
                )
        beyond_exit: frozenset[int] = frozenset()
        if self.exit_layer is not None:
            if self.exit_layer >= num_layers:
                raise ValueError(
                    f"exit_layer must be in 1..{num_layers - 1} for {model}, got "
                    f"{shown(self.exit_layer)}"
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
            low=self.low and self.low.written_out(attention, mlp, num_layers),
            experts=None if len(mlp) == num_layers else self.experts,
            window=None if len(attention) == num_layers else self.window,
            num_layers=num_layers,
        )

    def skipped(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers left out, ascending: 2 * layer for attention, 2 * layer + 1 for MLP.

        `num_layers` may be left out where the config knows it, as a resolved one does.
        """
        resolved = self.resolve(self._depth(num_layers))
        return _numbered(resolved.attention, resolved.mlp)

    def rounded(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers run in low precision, numbered as in `skipped`, ascending."""
        low = self.resolve(self._depth(num_layers)).low
        return () if low is None else _numbered(low.attention or (), low.mlp or ())

    def kept(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers that the draft runs, exactly or rounded, as in `skipped`, ascending."""
        skipped = set(self.skipped(num_layers))
        return tuple(i for i in range(2 * self._depth(num_layers)) if i not in skipped)

    def shared_prefix(self, num_layers: int | None = None) -> int:
        """How many leading sublayers the draft runs unbroken and exactly; 2E for an exit at E.

        With fewer experts the first MLP is not among them, with a window no sublayer is.
        """
        changed = (*self.skipped(num_layers), *self.rounded(num_layers))
        if self.experts is not None:
            changed = (1, *changed)
        if self.window is not None:
            changed = (0, *changed)
        return min(changed, default=2 * self._depth(num_layers))

    @property
    def draft_vocabulary(self) -> tuple[int, ...] | None:
        """The tokens that drafts can draw, of the decoding options; None: all."""
        return None if self.decoding is None else self.decoding.draft_vocabulary

    @property
    def head_bits(self) -> int | None:
        """Bits of the head that drafts read; None if it is exact."""
        return None if self.low is None else self.low.head_bits

    @property
    def module_bits(self) -> int | None:
        """Bits of a trained module's linears; None if they are exact."""
        return self.low.bits if self.low is not None and self.low.head else None

    def bare(self) -> SkipConfig:
        """The parts that change what is drafted: no costs; of options vocabulary and lookup."""
        given = self.decoding or DecodingOptions()
        options = DecodingOptions(draft_vocabulary=given.draft_vocabulary, lookup=given.lookup)
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
    def load(cls, path: str | os.PathLike[str], entry: str | None = None) -> SkipConfig:
        """Read a file of `save`, or bare sets `{"attention": [...], "mlp": [...]}`.

        Args:
            entry: which one of a file that holds several by name, as the `skip_layers.json` that
                Draft & Verify publishes for four models.

        Raises:
            ValueError: the file is missing, is not JSON, or is not a skip config; says which. Or
                it lacks the entry, or holds several and none is named.
        """
        folder = Path(path).absolute().parent
        try:
            content = _entry(schema.parse_characters(read_file(path)), entry)
            return cls.from_dict(content)._weights_at(lambda name: folder / name)
        except OSError as error:
            raise ValueError(f"cannot read skip config {path}: {error.strerror}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"skip config {path}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path`, whole or not at all; trained weights by their relative path.

        Raises:
            OSError: the folder cannot be written.
            TypeError, ValueError: `notes` or `costs` hold something that is not JSON.
        """
        folder = Path(path).absolute().parent
        moved = self._weights_at(lambda name: os.path.relpath(name, folder))
        text = json.dumps(moved.to_dict(), indent=2, allow_nan=False) + "\n"
        # every list of numbers on one line, however long: no string holds a line break
        text = re.sub(r"\[\n[^][{}\"]+\]", lambda match: _one_line(match[0]), text)
        write_text(path, text)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: schema version, sets, and all fields that are not None."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values |= {"attention": list(self.attention), "mlp": list(self.mlp)}
        for name in ("low", "trained", "decoding"):
            block = getattr(self, name)
            if block is not None:
                values[name] = {
                    key: list(value) if isinstance(value, tuple) else value
                    for key, value in asdict(block).items()
                    if value is not None
                }
        return {"schema": SCHEMA} | {k: v for k, v in values.items() if v is not None}

    @classmethod
    def from_dict(cls, content: object) -> SkipConfig:
        """Read the JSON form; without a schema version it is what a person wrote, or bare sets.

        Raises:
            TypeError, ValueError: what is wrong, what is allowed, and what was found.
        """
        values = dict(mapping(content, "a skip config"))
        version(SCHEMA)(values.pop("schema", SCHEMA), "schema")
        _check_keys("a skip config", values, cls)
        chosen = [f.name for f in fields(cls) if f.compare]
        if not values.keys() & {*chosen}:
            raise ValueError(
                f"a skip config must have {', '.join(chosen[:-1])} or {chosen[-1]}, got none"
            )
        blocks = {"low": LowPrecision, "trained": Trained, "decoding": DecodingOptions}
        for name, block in blocks.items():
            if values.get(name) is not None:
                _check_keys(name, mapping(values[name], name), block)
                has(**{f.name: schema.anything for f in fields(block) if f.default is MISSING})(
                    values[name], name
                )
                values[name] = block(**values[name])
        return cls(**values)

    def __repr__(self) -> str:
        counted = (f.name for f in fields(self) if f.compare)
        values = {name: getattr(self, name) for name in counted}
        values = {name: value for name, value in values.items() if value not in (None, ())}
        return f"SkipConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _weights_at(self, place: Callable[[str], str | Path]) -> SkipConfig:
        """The same with the file of trained weights named in another way."""
        if self.trained is None:
            return self
        named = Path(os.path.normpath(place(self.trained.weights))).as_posix()
        return replace(self, trained=replace(self.trained, weights=named))

    def _depth(self, num_layers: int | None) -> int:
        if num_layers is None:
            num_layers = self.num_layers
        if num_layers is None:
            raise ValueError("num_layers is not known: pass it, or resolve the skip config first")
        return num_layers


check_costs = has(draft=schema.POSITIVE, verify=schema.items(schema.POSITIVE, least=1))
"""Check of a cost table, in whatever file it comes: c, and v from one token on."""


def _entry(content: Any, name: str | None) -> Any:
    """The skip config of that name, of a file that holds several; else what the file holds."""
    known = {each.name for each in fields(SkipConfig)} | {"schema"}
    several = isinstance(content, dict) and bool(content) and not known & {*content}
    if not several or not all(isinstance(each, dict) for each in content.values()):
        if name is not None:
            raise ValueError(f"there is no entry {name!r}: the file is one skip config, or none")
        return content
    names = ", ".join(map(shown, content))
    if name is None:
        raise ValueError(f"the file holds several; choose with --entry (in Python entry=): {names}")
    if name not in content:
        raise ValueError(f"there is no entry {name!r}; the file has {names}")
    return content[name]


def _numbered(attention: Iterable[int], mlp: Iterable[int]) -> tuple[int, ...]:
    """Layer indices as sublayers, ascending."""
    return tuple(sorted([*(2 * layer for layer in attention), *(2 * layer + 1 for layer in mlp)]))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("[ ", "[").replace(" ]", "]")


def _check_keys(name: str, values: dict[str, Any], allowed: type) -> None:
    names = [f.name for f in fields(allowed)]
    unknown = [key for key in values if key not in names]
    if unknown:
        raise ValueError(
            f"{name} may have the keys {', '.join(names)}; got {', '.join(map(shown, unknown))}"
        )
