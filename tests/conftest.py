"""Settings that every test shares: repeatable random cases, one thread a process, no network."""

import os
from typing import Any

import pytest
from hypothesis import settings

# read once, when torch is imported; tests run side by side, and each child process inherits it
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LAYERSKIP_CACHE"] = ""  # no times of passes from before, and none for later
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read once, when huggingface_hub is imported

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def llama() -> Any:
    """A tiny model that no test changes."""
    from models import lively_model

    return lively_model("llama")


@pytest.fixture
def built() -> None:
    """Native passes, or the test is skipped."""
    from layerskip.model import extension

    reason = extension.refusal()
    if reason is not None:
        pytest.skip(reason)
