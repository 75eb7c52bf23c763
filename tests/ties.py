"""Texts of two ways to decode that may differ at near-ties only, and by how much they miss."""

import torch

from layerskip.decoding.noise import gumbel_noise


def scores_after(model, seen, key, temperature):
    """The scores (V,) whose argmax follows the tokens (n,): logits, or log law + noise."""
    with torch.no_grad():
        logits = model(seen[None]).logits[0, -1].float()  # (V,)
    if key is None:
        return logits
    noise = gumbel_noise([key], [len(seen)], len(logits), device=logits.device)[0]
    return logits / temperature + noise


def partings(model, mask, texts, others, *, keys=None, temperature=1.0):
    """For every row whose texts differ: how far the worse of the two tokens is from the best.

    Args:
        mask: of the left-padded prompts, (B, W).
        texts, others: prompts and new tokens, (B, W + n) each.
        keys: stream keys of rows drawn by the coupled rule; greedy without.
    """
    gaps = []
    for row, (text, other) in enumerate(zip(texts, others, strict=True)):
        differing = (text != other).nonzero()
        if not len(differing):
            continue
        place, first = int(differing[0]), mask.shape[1] - int(mask[row].sum())
        assert place >= mask.shape[1]
        key = None if keys is None else keys[row]
        scores = scores_after(model, text[first:place], key, temperature)
        worse = min(scores[int(text[place])], scores[int(other[place])])
        gaps.append(float(scores.max() - worse))
    return gaps
