"""Texts that servers write, and chats by sessions and servers."""

import torch
from models import prompt

import layerskip
from layerskip.api.session import Session
from layerskip.serving.requests import TextRequest
from layerskip.serving.scheduler import Serving


def drain(serving):
    while serving.step():
        pass


def said(pieces):
    return [token for piece in pieces for token in piece.tokens]


def finished(serving, *tasks):
    """The pieces of the last of some tasks that are submitted at once."""
    for task in tasks:
        told = []
        serving.submit(task, told.append)
    drain(serving)
    return told


def chat(model, turns, new_tokens, **how):
    """A chat by a session and by a server, whose texts must be those of plain decoding.

    In the server, each turn decodes beside another text. Returns how many tokens were known at
    the beginning of each turn, to the session and to the server.
    """
    session, serving = Session(model, memory=1 << 24, **how), Serving(model, max_rows=2, **how)
    text, known = prompt(12), []
    for turn in range(turns):
        law = {"max_new_tokens": new_tokens, "do_sample": False}
        want = layerskip.generate(model, text, enabled=False, **law).sequences
        out = session.generate(text, **law)
        assert out.sequences.tolist() == want.tolist()
        tasks = [TextRequest(ids[0].tolist(), new_tokens) for ids in (prompt(7, seed=9), text)]
        told = finished(serving, *tasks)
        assert said(told) == want[0, text.shape[1] :].tolist()
        assert told[-1].counts.drafted > 0
        known.append((out.stats.num_known_tokens, told[-1].counts.cached))
        text = torch.cat([want, prompt(3, seed=turn)], 1)
    return known
