"""The base class of this package's own errors."""


class LayerskipError(ValueError):
    """An error that has a class of its own here; other wrong values raise a plain ValueError."""
