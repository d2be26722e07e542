"""Blocks, heads and channels of published models, without the imports of the planner.

GPT-2 (Radford et al. 2019), the GPT-3 sizes (Brown et al. 2020, table 2.1), GPT-NeoX-20B (Black et al. 2022), and OPT
30B and 66B (Zhang et al. 2022). 70b is a GPT with as many parameters as Llama 70B.
"""

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
