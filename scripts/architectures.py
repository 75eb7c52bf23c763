"""Regenerates the table in layerskip/families/served_models.py for the installed transformers.

    python scripts/architectures.py

The newest version that pyproject.toml admits is to be installed: tests compare older ones, too.
It contains the model types that the library lists as causal language models and encoder-decoders,
and the opened ones among its other lists. Models are judged by class and default configuration;
none is built.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from layerskip.families import served_models
from layerskip.families.known import ASSISTANTS, CONDITIONAL
from layerskip.model.whole import support

_HYBRID = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_AS_PUBLISHED: dict[str, dict[str, Any]] = {"lfm2": _HYBRID, "lfm2_moe": _HYBRID}
"""Settings of actual checkpoints where the default configuration differs."""


def served() -> dict[str, str]:
    """By model type of the installed library, its level, or why it is refused."""
    kinds = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *CONDITIONAL, *ASSISTANTS}
    kinds |= {
        kind
        for kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
        if CONFIG_MAPPING[kind].is_encoder_decoder  # the others read sound
    }
    return {kind: _served(kind) for kind in sorted(kinds & {*CONFIG_MAPPING})}


def _served(kind: str) -> str:
    if kind in ASSISTANTS:
        return "assistant"
    config = CONFIG_MAPPING[kind](**_AS_PUBLISHED.get(kind, {}))
    how, why = support(config)
    if how != "refused" and config.is_encoder_decoder:
        return f"{how}, with an encoder"
    if how == "opened" and kind in CONDITIONAL:
        return "opened, with pictures"
    if how != "refused":
        return how
    reason = why.partition(" is not supported: ")[2]
    return "refused: " + re.sub(r"its cache \(.*?\)", "its cache", reason)


def main() -> None:
    levels = served()
    groups_of = [*served_models.DRAFTS, *sorted({*levels.values()} - served_models.DRAFTS.keys())]
    groups = ""
    for how in groups_of:
        names = " ".join(kind for kind, level in levels.items() if level == how)
        lines = textwrap.wrap(names, 92, break_on_hyphens=False, break_long_words=False)
        inside = "\n".join("        " + line for line in lines)
        groups += f'    "{how}": """\n{inside}\n    """,\n'
    path = Path(served_models.__file__)
    text = re.sub(
        r"(?s)\n_GROUPS = \{.*?\n\}\n", "\n_GROUPS = {\n" + groups + "}\n", path.read_text()
    )
    text = re.sub('TRANSFORMERS = ".*"', f'TRANSFORMERS = "{transformers.__version__}"', text)
    path.write_text(text)


if __name__ == "__main__":
    main()
