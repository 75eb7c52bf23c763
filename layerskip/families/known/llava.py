"""LLaVA and LLaVA-NeXT: a text decoder of any family with pictures, which are causal."""

from layerskip.families.family import Conditional

LLAVA = Conditional("llava")
LLAVA_NEXT = Conditional("llava_next")
