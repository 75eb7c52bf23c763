"""LLaVA and LLaVA-NeXT: a text decoder of any family behind pictures, which are causal."""

from layerskip.model.family import Conditional

LLAVA = Conditional("llava")
LLAVA_NEXT = Conditional("llava_next")
