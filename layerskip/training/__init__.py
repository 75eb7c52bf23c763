"""Recipes that train a model's early exits."""
