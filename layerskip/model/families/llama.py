"""Llama, the reference for the other families."""

from layerskip.model.family import Family

LLAMA = Family("llama")
