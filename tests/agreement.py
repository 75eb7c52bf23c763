"""Compares two ways to compute sublayers, on the same hidden states."""

import torch
from models import WINDOW, prompt

# The largest difference after one sublayer, relative to its largest number. Norms use float32 in
# every dtype. In bfloat16 and float16 (8 and 11 significant bits), a difference in float32 can flip
# the last bit, but
BOUNDS = {
    torch.float64: 1e-6,
    torch.float32: 1e-5,
    torch.bfloat16: 2 * 2**-8,
    torch.float16: 2 * 2**-11,
}
# seldom does. A cast in the wrong place would change a quarter of the numbers.
DIFFERING = {torch.bfloat16: 0.02, torch.float16: 0.05}
# A prefill longer than the window, one token, a verification of five, one token, one of eight.
PASSES = (WINDOW + 4, 1, 5, 1, 8)


@torch.no_grad()
def pairs(modules, other, *, rows=1, ragged=False, passes=PASSES):
    """What both paths make of the module path's hidden states, after every sublayer and the head,
    in every pass of so many tokens."""
    tokens = prompt(sum(passes), rows=rows)
    slots = sum(passes) + 21
    both = [
        (path, (path.new_cache(rows, slots), path.rotary(slots, slots)))
        for path in (modules, other)
    ]
    starts = [0] * rows
    for number, count in enumerate(passes):
        for _, (cache, _) in both:
            cache.place(starts, count)
        fed = torch.stack([tokens[row, start : start + count] for row, start in enumerate(starts)])
        (hidden, want_step), (_, got_step) = (path.feed(fed, *more) for path, more in both)
        if want_step.inputs is not None and got_step.inputs is not None:
            yield want_step.inputs, got_step.inputs
            got_step.inputs = want_step.inputs
        for block, other_block in zip(modules.blocks, other.blocks, strict=True):
            got = other_block(hidden, got_step)
            hidden = block(hidden, want_step)
            yield hidden, got
        yield modules.logits(hidden), other.logits(hidden)
        starts = [start + count for start in starts]
        if ragged and number == 0:
            starts = [start - 3 * row for row, start in enumerate(starts)]


def assert_agree(modules, other, **batch):
    dtype = modules.dtype
    differing = numbers = 0
    for want, got in pairs(modules, other, **batch):
        assert (got.dtype, got.shape) == (want.dtype, want.shape) == (dtype, want.shape)
        assert (got - want).abs().max() <= BOUNDS[dtype] * want.abs().max()
        differing += int((got != want).sum())
        numbers += got.numel()
    assert differing <= DIFFERING.get(dtype, 1) * numbers
