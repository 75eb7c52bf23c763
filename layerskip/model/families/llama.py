"""Llama, which the other families are compared with."""

from layerskip.model.family import Family

LLAMA = Family("llama")
