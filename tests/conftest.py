"""Settings that every test shares: repeatable random cases, and no network."""

import os

from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when huggingface_hub is imported

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
