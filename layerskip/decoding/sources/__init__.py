"""The kinds of sources, a file each, and the source that a skip config stands for."""

from layerskip.config import SkipConfig
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.sublayers import SublayerDraft
from layerskip.decoding.sources.trained import TrainedDraft
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
