"""The table of architectures: how each of the library's language models is served here.

scripts/architectures.py generates it. A test compares it with the installed library.
"""

from __future__ import annotations

TRANSFORMERS = "5.24.0"
"""The version of transformers whose models are listed."""
DRAFTS = {
    "opened": (
        "sublayers left out, early exits, 8 and 4 bits, trained drafts, lookups, a second model, "
        "custom sources"
    ),
    "opened, with pictures": "the same, also after prompts with pictures",
    "opened, with an encoder": "the same; lookups in what the encoder reads, too",
    "whole": "lookups, a second model, custom sources, all linears in 8 or 4 bits",
    "whole, with an encoder": "the same; lookups in what the encoder reads, too",
    "assistant": "none: it drafts for its Gemma 4",
}
"""By level, what may draft there."""
_GROUPS = {
    "opened": """
        apertus arcee cwm dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo gemma
        gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe granite granite_swa
        granitemoe helium hunyuan_v1_dense hunyuan_v1_moe hyperclovax internlm3 iquestcoder llama
        mellum ministral ministral3 mistral mixtral olmo2 olmo3 olmoe phi3 qwen2 qwen2_moe qwen3
        qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next sarvam_moe seed_oss smollm3 solar_open
        vaultgemma
    """,
    "opened, with pictures": """
        gemma3 gemma4 gemma4_unified llava llava_next mistral3 muse_glimmer
    """,
    "opened, with an encoder": """
        t5gemma
    """,
    "whole": """
        afmoe apertus1p5_text aria_text axk1 bamba beam biogpt bitnet bloom codegen cohere cohere2
        cohere2_moe cohere_compass_text ctrl dbrx deepseek_v2 deepseek_v3 diffllama doge dory emu3
        falcon falcon_h1 falcon_mamba flint fuyu gemma3n gemma3n_text git glm4_moe_lite got_ocr2
        gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granitemoe_swa
        granitemoehybrid granitemoeshared hrm_text hy_v3 jais2 jamba jetmoe kolibri1 laguna lfm2
        lfm2_moe lfm3 llama4 llama4_text longcat_flash mamba mamba2 mimo_v2_flash minicpm3
        minimax_m2 minimax_m3_vl_text mllama modernbert-decoder moss_transcribe_diarize mpt nanochat
        nemotron nemotron_h olmo olmo_hybrid opt persimmon phi phi4_multimodal phimoe qwen3_5
        qwen3_5_moe sarvam_mla stablelm starcoder2 xglm youtu
    """,
    "whole, with an encoder": """
        bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp
        nllb-moe pegasus pegasus_x plbart seamless_m4t seamless_m4t_v2 t5 t5gemma2 umt5
    """,
    "assistant": """
        gemma4_assistant gemma4_unified_assistant
    """,
    "refused: it generates audio": """
        moshi musicgen musicgen_melody
    """,
    "refused: it has a recurrent state of a kind that is not kept here": """
        bailing_hybrid deepseek_v4 kimi_linear lara_mini qwen4_exp qwen4_exp_text rwkv xlstm zamba
        zamba2 zaya
    """,
    "refused: it has bidirectional attention (its config says is_decoder=False)": """
        bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert reformer
        rembert roberta roberta-prelayernorm roc_bert roformer trocr xlm-roberta xlm-roberta-xl xmod
    """,
    "refused: it is an encoder-decoder that reads something other than text": """
        whisper
    """,
    "refused: it keeps its recurrent state in its modules, so for one text at a time": """
        recurrent_gemma
    """,
    "refused: it predicts in several streams": """
        prophetnet
    """,
    "refused: it predicts the place of a mask token, which its attention sees from all sides": """
        xlm
    """,
    "refused: it puts virtual tokens in front of the prompt": """
        cpmant
    """,
    "refused: it works on patches of bytes, whose borders move with the text": """
        blt
    """,
    "refused: its cache cannot be rolled back": """
        axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 inkling2_loop_text
        inkling2_text inkling_text minimax
    """,
    "refused: its decoder has no configuration": """
        fsmt
    """,
    "refused: its decoder is a model of its own, with a head": """
        encoder-decoder
    """,
    "refused: its forward names no cache among its arguments": """
        openai-gpt xlnet
    """,
    "refused: its head reads its encoder's routers": """
        switch_transformers
    """,
}
SERVED = {kind: how for how, kinds in _GROUPS.items() for kind in kinds.split()}
"""By `model_type`, its level, or why it is refused.

It is that of a default configuration. A checkpoint is judged by its own, and by its class.
"""
TABLE = {"transformers": TRANSFORMERS, "drafts": DRAFTS, "served": SERVED}
