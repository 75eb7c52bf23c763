"""OLMo 2 and 3: norms after the sublayers, and over all heads of queries and of keys."""

from layerskip.families.family import Family

BEHIND = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
OLMO2 = Family("olmo2", norms=BEHIND, norm="wide")
OLMO3 = Family("olmo3", norms=BEHIND, norm="wide", windows="by type")
