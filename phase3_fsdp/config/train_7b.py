# A GPT with 6.7B parameters on FineWeb-Edu, for eight GPUs of 80 GB, with activation checkpointing.
#   make phase3 GPUS=8 CONFIG=config/train_7b.py
dataset = "fineweb_edu"
n_layer, n_head, n_embd, block_size = 32, 32, 4096, 2048
batch_size = 4
gradient_accumulation_steps = 64
dtype = "bfloat16"
fsdp_activation_checkpointing = "full"
learning_rate, min_lr, beta2 = 1.2e-4, 1.2e-5, 0.95
max_iters = 150_000
warmup_iters = 2_000
eval_interval = 1_000
eval_iters = 64
compile = True
