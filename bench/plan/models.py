"""Blocks, heads and channels of published models, without the imports of the planner.

GPT-2 (Radford et al. 2019), the GPT-3 sizes (Brown et al. 2020, table 2.1), GPT-NeoX-20B (Black et al. 2022), and OPT
30B and 66B (Zhang et al. 2022). 70b is a GPT with as many parameters as Llama 70B. The sizes of Llama 2 (Touvron et al.
2023) and Llama 3 (Grattafiori et al. 2024) have all fields of their shape.
"""

from typing import Any

MODELS = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "1.3b": (24, 16, 2048),
    "2.7b": (32, 32, 2560),
    "6.7b": (32, 32, 4096),
    "13b": (40, 40, 5120),
    "20b": (44, 64, 6144),
    "30b": (48, 56, 7168),
    "66b": (64, 72, 9216),
    "70b": (86, 64, 8192),
    "175b": (96, 96, 12288),
}

LLAMA_3 = {"model": "llama", "n_kv_head": 8, "vocab_size": 128256, "rope_theta": 500000.0}
LLAMA_3_1B = {"n_layer": 16, "n_head": 32, "n_embd": 2048, "intermediate_size": 8192, "tie_embeddings": True}
LLAMA_2_7B = {"n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 11008, "vocab_size": 32000}
LLAMAS: dict[str, dict[str, Any]] = {
    "llama2-7b": {"model": "llama", **LLAMA_2_7B},
    "llama3.2-1b": {**LLAMA_3, **LLAMA_3_1B},
    "llama3-8b": {**LLAMA_3, "n_layer": 32, "n_head": 32, "n_embd": 4096, "intermediate_size": 14336},
    "llama3-70b": {**LLAMA_3, "n_layer": 80, "n_head": 64, "n_embd": 8192, "intermediate_size": 28672},
}
