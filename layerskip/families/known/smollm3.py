"""SmolLM3: some layers do not rotate queries and keys by their positions."""

from typing import Any

from layerskip.families.family import Family


class SmolLM3(Family):
    def turns(self, attention: Any) -> bool:
        return bool(attention.use_rope)


SMOLLM3 = SmolLM3("smollm3", windows="by type")
