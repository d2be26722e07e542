# A GPT with 760M parameters on FineWeb-Edu, for two GPUs of 48 GB: Muon, bfloat16, activation checkpointing.
#   make phase3 GPUS=2 CONFIG=config/train_mid.py
dataset = "fineweb_edu"
n_layer, n_head, n_embd, block_size = 24, 16, 1536, 2048
batch_size = 8
gradient_accumulation_steps = 16
dtype = "bfloat16"
optimizer = "muon"
fsdp_wrap = 2_000_000
fsdp_activation_checkpointing = "full"
learning_rate, min_lr, beta2 = 6e-4, 6e-5, 0.95
max_iters = 100_000
warmup_iters = 2_000
eval_interval = 1_000
eval_iters = 64
compile = True
