"""The version of this package, for code on every floor."""

__version__ = "0.1.0"
