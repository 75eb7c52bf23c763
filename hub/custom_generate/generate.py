"""`model.generate()` with drafts by the model itself. The text stays the same.

transformers loads this file with `custom_generate="ORG/layerskip"`, or from a local folder.
"""

from typing import Any

import layerskip


def generate(
    inputs: Any = None, generation_config: Any = None, *, model: Any, **kwargs: Any
) -> Any:
    """Call `layerskip.generate`, whose settings may be given as keywords.

    Returns:
        As `model.generate()`: token ids (B, W + n), or an output if `return_dict_in_generate` is
        set, here or in the generation config.
    """
    config = generation_config or model.generation_config
    kwargs.setdefault("return_dict_in_generate", bool(config.return_dict_in_generate))
    return layerskip.generate(model, inputs, generation_config=generation_config, **kwargs)
