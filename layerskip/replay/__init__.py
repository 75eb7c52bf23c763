"""Replays drafts along recorded texts, which are decoded only once."""
