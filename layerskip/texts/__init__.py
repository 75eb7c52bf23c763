"""Prompts, texts of tokens, vocabularies, grammars and pictures."""
