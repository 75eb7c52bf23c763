"""Sources of drafts, one file for each kind; and the source of a skip config or second model."""

from collections.abc import Sequence

from layerskip.config import SkipConfig
from layerskip.decoding.sources.assistant import Assistant
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.eagle import EagleHead
from layerskip.decoding.sources.official import Official
from layerskip.decoding.sources.sublayers import SublayerDraft
from layerskip.decoding.sources.trained import TrainedDraft
from layerskip.model.assistants import is_assistant
from layerskip.model.eagle import Eagle
from layerskip.model.sublayers import Sublayers


def source_of(model: Sublayers, draft: SkipConfig | Source) -> Source:
    """The source of a skip config, or the source itself.

    Raises:
        ValueError: a skip config that does not fit the model, or names a module of another one.
    """
    if isinstance(draft, Source):
        return draft
    skip = draft.resolve(model.num_layers)
    if skip.trained is not None and skip.trained.module:
        return TrainedDraft(model, skip)
    return SublayerDraft(model, skip)


def second_model(
    target: Sublayers, model: Sublayers | Eagle, tokens: Sequence[int] | None = None
) -> Assistant | Official | EagleHead:
    """The source of a second model, of an official assistant of the target, or of a head for it.

    Args:
        tokens: the only ones to draft; None: all.

    Raises:
        ValueError: an official assistant or a head of another model.
    """
    if isinstance(model, Eagle):
        return EagleHead(target, model, tokens)
    if is_assistant(model.model.config):
        return Official(target, model, tokens)
    if tokens is not None:
        both = min(model.vocabulary, target.vocabulary)
        model = model.trimmed([token for token in tokens if token < both])
    return Assistant(model)
