"""The process of llama.cpp, whose waiting threads would disturb those of other methods.

It does not import torch, so that it starts in a fraction of a second.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any


def serve(pipe: Connection, file: str, options: dict[str, Any], ends: frozenset[int]) -> None:
    """Answer every pair of a prompt and a limit with the first new token, then with all of them.

    An exception is an answer, too, and ends the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ.pop("GOMP_SPINCOUNT", None)  # the command line sets it for torch's threads
    try:
        llama: Any = import_module("llama_cpp").Llama(file, **options)
        while True:
            prompt, limit = pipe.recv()
            llama.reset()  # do not reuse the previous text
            tokens: list[int] = []
            for token in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
                tokens.append(int(token))
                if len(tokens) == 1:
                    pipe.send(tokens[0])
                if len(tokens) == limit or tokens[-1] in ends:
                    break
            pipe.send(tokens)
    except EOFError:  # the parent has ended
        pass
    except Exception as error:
        pipe.send(ValueError(f"llama.cpp: {error}"))
