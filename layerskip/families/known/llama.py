"""Llama, the reference for the other families."""

from layerskip.families.family import Family

LLAMA = Family("llama")
