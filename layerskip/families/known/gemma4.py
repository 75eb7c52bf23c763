"""Gemma 4: upper layers that read the keys of lower ones, separate layer inputs, and experts."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from layerskip.families.experts import Mixture
from layerskip.families.family import AssistantFamily, Conditional, Family, part_named
from layerskip.families.known.gemma import AROUND


class Gemma4Family(Family):
    def writes(self, attention: Any) -> bool:
        return not attention.is_kv_shared_layer

    def mixture(self, layer: Any) -> Mixture | None:
        router = part_named(layer, "router")
        if router is None:
            return None
        return Mixture(
            router,
            layer.experts,
            router.proj.weight,
            router.config.top_k_experts,
            norm=router.norm,
            scale=router.scale,
            number=router.scalar_root_size,
            factors=router.per_expert_scale,
            cast=False,
            before=layer.pre_feedforward_layernorm_2,
            after=layer.post_feedforward_layernorm_2,
            dense=layer.post_feedforward_layernorm_1,
        )


@dataclass(frozen=True)
class Gemma4Pictures(Conditional):
    """Its pictures are causal in full layers; in the unified model they ignore windows."""

    unified: bool = False

    def placeholders(self, config: Any) -> list[int]:
        tokens = (config.image_token_id, config.video_token_id, config.audio_token_id)
        return [token for token in tokens if token is not None]

    def two_way(self, text: Any) -> bool:
        return bool(text.use_bidirectional_attention == "vision")

    def sees(self, same: Tensor, near: Tensor | None) -> Tensor | None:
        if self.unified:
            return same
        return None if near is None else same & near


def _family(name: str, package: str, *, inputs: bool) -> Gemma4Family:
    return Gemma4Family(
        name,
        package=package,
        norms=AROUND,
        norm="wide",
        windows="by type",
        shares_keys=True,
        softcap=True,
        inputs=inputs,
        tail=True,
    )


GEMMA4 = _family("gemma4_text", "gemma4", inputs=True)
UNIFIED = _family("gemma4_unified_text", "gemma4_unified", inputs=False)
PICTURES = Gemma4Pictures("gemma4")
UNIFIED_PICTURES = Gemma4Pictures("gemma4_unified", unified=True)
ASSISTANT = AssistantFamily("gemma4_assistant", "gemma4", "Gemma4")
UNIFIED_ASSISTANT = AssistantFamily("gemma4_unified_assistant", "gemma4_unified", "Gemma4Unified")
