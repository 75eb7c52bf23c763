"""Families of models, and the parts of a layer that follow from them."""
