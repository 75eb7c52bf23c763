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


def together(serving, tasks):
    """The pieces of each of some tasks that are submitted at once."""
    told = [[] for _ in tasks]
    for task, pieces in zip(tasks, told, strict=True):
        serving.submit(task, pieces.append)
    drain(serving)
    return told


def finished(serving, *tasks):
    """The pieces of the last of them."""
    return together(serving, tasks)[-1]


def alone(model, task, execution="fused"):
    """The text of a task, by plain decoding alone."""
    rounds = layerskip.decode(
        model,
        torch.tensor([list(task.prompt)]),
        max_new_tokens=task.max_new_tokens,
        do_sample=task.do_sample,
        temperature=task.temperature,
        top_k=task.top_k,
        top_p=task.top_p,
        logits_processor=task.processors,
        eos_token_id=sorted(task.eos or ()),
        seeds=[task.seed],
        enabled=False,
        execution=execution,
    )
    return [token for each in rounds for token in each.tokens[0]]


def chat(model, turns, new_tokens, **how):
    """A chat by a session and by a server, whose texts must be those of plain decoding.

    In the server, each turn decodes beside another text. Both know the turns before.
    """
    session, serving = Session(model, memory=1 << 24, **how), Serving(model, max_rows=2, **how)
    text = prompt(12)
    for turn in range(turns):
        law = {"max_new_tokens": new_tokens, "do_sample": False}
        want = layerskip.generate(model, text, enabled=False, **law).sequences
        out = session.generate(text, **law)
        assert out.sequences.tolist() == want.tolist()
        tasks = [TextRequest(ids[0].tolist(), new_tokens) for ids in (prompt(7, seed=9), text)]
        told = finished(serving, *tasks)
        assert said(told) == want[0, text.shape[1] :].tolist()
        assert told[-1].counts.drafted > 0
        for known in (out.stats.num_known_tokens, told[-1].counts.cached):
            assert known >= 12 if turn else known == 0
        text = torch.cat([want, prompt(3, seed=turn)], 1)
