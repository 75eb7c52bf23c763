"""The modules that are trained, by kind of draft.

Shapes: B windows, T tokens of one, H hidden width, K tokens predicted at once, V vocabulary, n
tokens that the loss covers, D depths at which the target's states are read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerskip.backends.base import logit_transform
from layerskip.config.registry import TRAINED, named
from layerskip.config.skips import SkipConfig
from layerskip.files.environment import free_memory
from layerskip.model.opened_model import OpenedModel
from layerskip.training.losses import Step
from layerskip.weights.rounded import TrimmedHead

RATES = {"exit-block": 3e-3, "heads": 5e-3, "streams": 5e-3, "assistant": 1e-3, "eagle3": 1e-3}
"""Learning rates by kind. On demo-gemma2, modules reach in 150,000 tokens what took 240,000 to
470,000 at a fifth or a tenth of it."""


def skip_for(kind: str, skip: SkipConfig | None, num_layers: int) -> SkipConfig:
    """The resolved skip config of a draft of a kind; for None the usual one: without any layers, or
    with a quarter of them before an exit.

    Raises:
        ValueError: the skip config does not suit this kind.
    """
    if kind not in TRAINED or not named("module", kind).behind_exit:
        resolved = (skip or SkipConfig()).resolve(num_layers)
        if resolved.shared_prefix() < 2 * num_layers:
            raise ValueError(
                f"a draft of kind {kind} runs none of the model's layers; name no skip"
            )
        return resolved
    resolved = (skip or SkipConfig.early_exit(max(1, round(num_layers / 4)))).resolve(num_layers)
    if not len(resolved.kept()) == resolved.shared_prefix() < 2 * num_layers:
        raise ValueError(
            "an exit block follows an early exit: name an exit_layer, and leave out or round "
            "nothing before it"
        )
    return resolved


class Student(nn.Module):
    """A draft's module in training, with weights in float32, and the frozen target that it follows.

    Its norm and head turn states into logits, the module's too. States that the target has read are
    kept for later epochs, in up to half of the free memory.

    Args:
        kind: of draft; `config.registry` names the class of its module.
        tap: number of sublayers after which an exit block reads states.
        tokens: the tokens that the loss covers, (n,).
    """

    def __init__(self, target: OpenedModel, kind: str, tap: int, tokens: Tensor) -> None:
        super().__init__()
        self.block = named("module", kind)(target).float()
        self.target, self.tap, self.finish = target, tap, logit_transform(target)
        self.head = TrimmedHead(target.unembedding, tokens.tolist())
        places = torch.full((target.vocabulary,), -1)  # index of each token among these
        places[tokens] = torch.arange(len(tokens))
        self.places = places.to(target.device)  # (V,)
        self._kept: dict[bytes, Tensor] = {}  # by window, (D, T, H)
        self._room = (free_memory() or 0) // 2

    def steps(self, ids: Tensor) -> list[Step]:
        """The draft's steps on windows (B, T): one after an exit, or all in a pass."""
        read = self._read(ids)  # (B, D, T, H)
        with torch.no_grad():
            wanted = self._logits(read[:, -1])  # (B, T, n)
        following = F.pad(self.places[ids[:, 1:]], (0, 1), value=-1)  # (B, T)
        if self.block.behind_exit:
            made = self.block(read[:, 0])[:, :, None]  # (B, T, 1, H)
        else:
            before = F.pad(read[:, -1, :-1], (0, 0, 1, 0))  # (B, T, H) of the token before each
            made = self.block(before, self.target.embed(ids).float())  # (B, T, K, H)
        count = made.shape[1]
        return [
            (self._logits(made[:, : count - k, k]), wanted[:, k:], following[:, k:])
            for k in range(min(made.shape[2], count))
        ]

    @torch.no_grad()
    def _read(self, ids: Tensor) -> Tensor:
        """The target's states at the tap, unless that is its end, and at its end, (B, D, T, H)."""
        keys, target = [row.tobytes() for row in ids.cpu().numpy()], self.target
        found = self._kept
        if not {*keys} <= found.keys():
            states, done = [], 0
            with torch.autocast(ids.device.type, enabled=False):  # as exact as in decoding
                hidden, step = target.first_pass(ids)
                for depth in sorted({self.tap, target.num_sublayers}):
                    hidden = target.run(hidden, step, range(done, depth))
                    states.append(hidden.cpu())
                    done = depth
            found = dict(zip(keys, torch.stack(states, 1), strict=True))
            size = sum(each.nbytes for each in found.values())
            if size <= self._room:
                self._kept |= found
                self._room -= size
        return torch.stack([found[key] for key in keys]).to(ids.device).float()

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of states (B, T, H), with gradients: float32, (B, T, n)."""
        hidden = self.target.decoder.norm(hidden.to(self.target.dtype))
        out = F.linear(hidden, self.head.weight, self.head.bias)
        return (out if self.finish is None else self.finish(out)).float()

    def weights(self) -> dict[str, Tensor]:
        """The tensors for the draft's file."""
        return {name: weight.half() for name, weight in self.block.state_dict().items()}
