"""The kinds of sources, a file each; what a skip config names becomes one here."""

from layerskip.config import SkipConfig
from layerskip.decoding.sources.base import Source
from layerskip.decoding.sources.sublayers import SublayerDraft
from layerskip.decoding.sources.trained import trained_draft
from layerskip.model.sublayers import Sublayers


def source_of(model: Sublayers, draft: SkipConfig | Source) -> Source:
    """What drafts, by a skip config or as it is.

    Raises:
        ValueError: a skip config that does not fit the model, or names a module of another one.
    """
    if isinstance(draft, Source):
        return draft
    skip = draft.resolve(model.num_layers)
    if skip.trained is not None and skip.trained.module:
        return trained_draft(model, skip)
    return SublayerDraft(model, skip)
