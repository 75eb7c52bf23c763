"""Sources of drafts, one file per kind, and the choice of a source for a given draft."""

from collections.abc import Sequence

from layerskip.config.skips import SkipConfig
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.eagle import EagleHead
from layerskip.decoding.sources.official import Official
from layerskip.decoding.sources.sublayer_draft import SublayerDraft
from layerskip.decoding.sources.trained import TrainedDraft
from layerskip.model.assistants import is_assistant
from layerskip.model.eagle_head import Eagle
from layerskip.model.sublayers import Sublayers


def source_of(model: Sublayers, draft: SkipConfig | Source) -> Source:
    """Return the source for a skip config; a source is returned unchanged.

    Raises:
        ValueError: a skip config does not fit the model, or names a module of another one.
    """
    if isinstance(draft, Source):
        return draft
    skip = draft.resolve(model.num_layers)
    if skip.trained is not None:
        return TrainedDraft(model, skip)
    return SublayerDraft(model, skip)


def second_model(
    target: Sublayers, model: Sublayers | Eagle, tokens: Sequence[int] | None = None
) -> Assistant | Official | EagleHead:
    """Return the source for a second model, the target's official assistant, or a head for it.

    Args:
        tokens: the only tokens to draft; None: all.

    Raises:
        ValueError: the official assistant or the head belongs to another model.
    """
    if isinstance(model, Eagle):
        return EagleHead(target, model, tokens)
    if is_assistant(model.model.config):
        return Official(target, model, tokens)
    if tokens is not None:
        both = min(model.vocabulary, target.vocabulary)
        model = model.trimmed([token for token in tokens if token < both])
    return Assistant(model)
