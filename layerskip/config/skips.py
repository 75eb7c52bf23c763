"""Skip configs: which parts of a model a draft leaves out or rounds, and their JSON form.

A model of L layers is a sequence of 2L residual sublayers: attention of layer i has index 2i, its
MLP 2i + 1. Early exit (LayerSkip, arXiv 2404.16710) and sublayer skipping (Draft & Verify, arXiv
2309.08168) are both a set of skipped indices; a draft runs each remaining sublayer exactly or in
low precision. It may also see less of the text than the model does, and have a trained module of
its own (`Trained`), stored in a file next to the config. Only these choices count for
equality and hash. The model that was searched, decoding options, costs and notes are stored along
with them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from reprlib import repr as shown
from typing import Any, Literal

from layerskip.config.low_precision import LowPrecision, Trained
from layerskip.config.options import DecodingOptions
from layerskip.files import schema
from layerskip.files.reading import errors_of, read_file
from layerskip.files.schema import checked, has, index_set, instance, integer, mapping, name_text
from layerskip.files.writing import write_text

__all__ = ["SCHEMA", "DecodingOptions", "LowPrecision", "SkipConfig", "Trained", "check_costs"]

SCHEMA = 3
"""Version of the JSON that `SkipConfig.save` writes, and the only one that `load` reads."""

COLDEST = 0.001
"""Commands and servers take the most likely tokens at any lower temperature, which would divide
scores by so little that they may leave float32."""

SINK = 4
"""The first slots of a text, which drafts with a window also see: they receive much attention
(StreamingLLM, arXiv 2309.17453)."""


check_costs = has(**schema.COSTS)
"""Checks a cost table from any kind of file: c, and v from one token on."""


@dataclass(frozen=True, kw_only=True, repr=False)
class SkipConfig:
    """The sublayers that a draft skips, and those of the rest that it rounds.

    It skips sets of attention and MLP sublayers, everything after an early exit, or both; `low`
    says what runs in low precision. Sets hold layer indices from 0 and are kept sorted.
    `resolve(num_layers)` checks them against a model and expands the exit and `low` into sets.
    Compare resolved configs, so that an early exit equals the same sets written out. A config may
    skip and round nothing (such a draft gains nothing).

    Raises:
        TypeError: an index is not an integer (bool and float are refused), or a field has the
            wrong type.
        ValueError: an index is negative or repeated, or a value is out of range.
    """

    attention: tuple[int, ...] = checked(index_set, ())
    mlp: tuple[int, ...] = checked(index_set, ())
    exit_layer: int | None = checked(integer(1))
    """E: the draft runs at most layers 0..E-1."""
    low: LowPrecision | None = checked(instance(LowPrecision))
    """The kept sublayers, and whether the head, that run in low precision; None: none."""
    trained: Trained | None = checked(instance(Trained))
    """A module trained for this draft; None: there is none."""
    experts: int | None = checked(integer())
    """Number of experts per token that the draft runs in a mixture of experts; 0: only the dense
    MLP that runs in parallel (Gemma 4); None: as many as the model."""
    window: int | None = checked(integer(1))
    """Number of most recent slots that the draft's attention sees, including its own token's.
    Layers with full attention also see the first SINK slots; layers whose own sliding window is not
    larger are unchanged. None: as much as the model sees."""
    num_layers: int | None = checked(integer(1), compare=False)
    """L of the model this was made for, if known; `resolve` rejects any other number."""
    model: str | None = checked(name_text, compare=False)
    """Hub id or name of the model this was searched on."""
    model_hash: str | None = checked(name_text, compare=False)
    decoding: DecodingOptions | None = checked(instance(DecodingOptions), compare=False)
    costs: dict[str, Any] | None = checked(check_costs, compare=False)
    """A cost table, in target steps: `draft` is c, `verify[n - 1]` is v for n tokens."""
    notes: dict[str, Any] | None = checked(mapping, compare=False)
    """The measurements of a search; any JSON."""

    def __post_init__(self) -> None:
        schema.check_fields(self)

    @classmethod
    def early_exit(cls, exit_layer: int) -> SkipConfig:
        """The draft runs layers 0..exit_layer-1, then the final norm and the head."""
        return cls(exit_layer=exit_layer)

    @classmethod
    def low_precision(cls, bits: Literal[8, 4] = 8) -> SkipConfig:
        """The draft runs everything, including the head, with weights rounded to `bits` bits."""
        return cls(low=LowPrecision(bits=bits))

    def resolve(self, num_layers: int) -> SkipConfig:
        """Return the canonical config for a model of `num_layers` layers: explicit sets, no exit.

        Its `low` contains no skipped sublayer, and is None if nothing is rounded.

        Raises:
            ValueError: an index or the exit lies outside the model, nothing is kept, or the config
                was made for another number of layers.
        """
        num_layers = integer(1)(num_layers, "num_layers")
        if num_layers not in self._resolved:
            self._resolved[num_layers] = self._written_out(num_layers)
        return self._resolved[num_layers]

    @cached_property
    def _resolved(self) -> dict[int, SkipConfig]:
        """By number of layers, since every call of a decoding asks many times."""
        return {}

    def _written_out(self, num_layers: int) -> SkipConfig:
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
            low=self.low and self.low.expanded(attention, mlp, num_layers),
            experts=None if len(mlp) == num_layers else self.experts,
            window=None if len(attention) == num_layers else self.window,
            num_layers=num_layers,
        )

    def skipped(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Skipped sublayers in ascending order: 2 * layer for attention, 2 * layer + 1 for MLP.

        `num_layers` is optional if the config contains it, as a resolved one does.
        """
        resolved = self.resolve(self._depth(num_layers))
        return _numbered(resolved.attention, resolved.mlp)

    def rounded(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers that run in low precision, in ascending order, numbered as in `skipped`."""
        low = self.resolve(self._depth(num_layers)).low
        return () if low is None else _numbered(low.attention or (), low.mlp or ())

    def kept(self, num_layers: int | None = None) -> tuple[int, ...]:
        """Sublayers that the draft runs, exactly or rounded, ascending, as in `skipped`."""
        skipped = set(self.skipped(num_layers))
        return tuple(i for i in range(2 * self._depth(num_layers)) if i not in skipped)

    def shared_prefix(self, num_layers: int | None = None) -> int:
        """Number of leading sublayers that the draft runs exactly, without a gap; 2E for exit E.

        With fewer experts, the first MLP ends this prefix. With a window it is empty.
        """
        changed = (*self.skipped(num_layers), *self.rounded(num_layers))
        if self.experts is not None:
            changed = (1, *changed)
        if self.window is not None:
            changed = (0, *changed)
        return min(changed, default=2 * self._depth(num_layers))

    @property
    def draft_vocabulary(self) -> tuple[int, ...] | None:
        """The tokens that drafts may use, from the decoding options; None: all."""
        return None if self.decoding is None else self.decoding.draft_vocabulary

    @property
    def head_bits(self) -> int | None:
        """Bits of the head's weights in drafts; None if the head is exact."""
        return None if self.low is None else self.low.head_bits

    @property
    def module_bits(self) -> int | None:
        """Bits of a trained module's linears; None if they are exact."""
        return self.low.bits if self.low is not None and self.low.head else None

    def bare(self) -> SkipConfig:
        """Keep only what affects the drafts: no costs, and of the options vocabulary and lookup."""
        given = self.decoding or DecodingOptions()
        options = DecodingOptions(draft_vocabulary=given.draft_vocabulary, lookup=given.lookup)
        return replace(self, decoding=options, costs=None)

    def matches(self, model: str | None, model_hash: str | None = None) -> bool | None:
        """Whether this was searched on the given model: by hash if both are known, else by id.

        Only hashes with the same prefix, which names their kind, are compared. None if nothing can
        be compared.
        """
        if self.model_hash is not None and model_hash is not None:
            kinds = [each.rpartition("-")[0] for each in (self.model_hash, model_hash)]
            if kinds[0] == kinds[1]:
                return self.model_hash == model_hash
        if self.model is not None and model is not None:
            return self.model == model
        return None

    @classmethod
    def load(cls, path: str | os.PathLike[str], entry: str | None = None) -> SkipConfig:
        """Read a file written by `save`, or bare sets `{"attention": [...], "mlp": [...]}`.

        Args:
            path: the file, or a folder with a `skip.json`, as a search or a training writes it.
            entry: the config to choose from a file that holds several by name, such as the
                `skip_layers.json` that Draft & Verify publishes for four models.

        Raises:
            ValueError: the file is missing, is not JSON or is not a skip config (the message says
                which); the entry is missing; or there are several configs and no entry is named.
        """
        path = Path(path)
        path = path / "skip.json" if path.is_dir() else path
        folder = path.absolute().parent
        with errors_of(f"skip config {path}"):
            content = _entry(schema.parse_characters(read_file(path)), entry)
            return cls.from_dict(content)._weights_at(lambda name: folder / name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON to `path` atomically, with trained weights as a relative path.

        Raises:
            OSError: the folder cannot be written.
            TypeError, ValueError: `notes` or `costs` contain something that is not JSON.
        """
        folder = Path(path).absolute().parent
        moved = self._weights_at(lambda name: os.path.relpath(name, folder))
        text = json.dumps(moved.to_dict(), indent=2, allow_nan=False) + "\n"
        # Put every list of numbers on one line, however long. No string contains a line break.
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
        """Read the JSON form. Without a schema version it is hand-written, or bare sets.

        Raises:
            TypeError, ValueError: the message says what is wrong, what is allowed and what was got.
        """
        values = dict(mapping(content, "a skip config"))
        schema.version(SCHEMA)(values.pop("schema", SCHEMA), "schema")
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
                values[name] = block(**values[name])
        return cls(**values)

    def __repr__(self) -> str:
        counted = (f.name for f in fields(self) if f.compare)
        values = {name: getattr(self, name) for name in counted}
        values = {name: value for name, value in values.items() if value not in (None, ())}
        return f"SkipConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def _weights_at(self, place: Callable[[str], str | Path]) -> SkipConfig:
        """Return this config with the path of its trained weights changed by `place`."""
        if self.trained is None:
            return self
        named = Path(os.path.normpath(place(self.trained.weights))).as_posix()
        return replace(self, trained=replace(self.trained, weights=named))

    def _depth(self, num_layers: int | None) -> int:
        if num_layers is None:
            num_layers = self.num_layers
        if num_layers is None:
            raise ValueError("num_layers is unknown: pass it, or resolve the skip config first")
        return num_layers


def _entry(content: Any, name: str | None) -> Any:
    """Return the named skip config if the file holds several, else the file's content."""
    known = {each.name for each in fields(SkipConfig)} | {"schema"}
    several = isinstance(content, dict) and bool(content) and not known & {*content}
    if not several or not all(isinstance(each, dict) for each in content.values()):
        if name is not None:
            raise ValueError(f"there is no entry {name!r}: the file does not have named entries")
        return content
    names = ", ".join(map(shown, content))
    if name is None:
        raise ValueError(f"the file holds several; choose with --entry (in Python entry=): {names}")
    if name not in content:
        raise ValueError(f"there is no entry {name!r}; the file has {names}")
    return content[name]


def _numbered(attention: Iterable[int], mlp: Iterable[int]) -> tuple[int, ...]:
    """Layer indices as sublayer numbers, in ascending order."""
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
    has(**{f.name: schema.anything for f in fields(allowed) if f.default is MISSING})(values, name)
