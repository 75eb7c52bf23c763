"""Parts of layers as papers define them, for references that tests write out."""

import torch


def rms_norm(x, scale, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


def turned(x, count, theta, *, pairs=False):
    """Rotate the first `count` dimensions of (T, heads, D) by each position's angles."""
    powers = torch.arange(0, count, 2).double() / count
    angles = torch.arange(len(x)).double()[:, None] / theta**powers  # (T, count / 2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    some, rest = x[..., :count], x[..., count:]
    a, b = (some[..., ::2], some[..., 1::2]) if pairs else some.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def attended(q, k, v):
    """Causal attention, (T, heads, D) each; several heads share keys."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    later = torch.ones(len(q), len(q)).triu(1).bool()
    law = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", law, v)
