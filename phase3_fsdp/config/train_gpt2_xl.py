# GPT-2 1.5B on FineWeb-Edu with FSDP: 16 bytes per parameter are 25 GB, sharded over the ranks.
#   make phase3 GPUS=8 CONFIG=config/train_gpt2_xl.py
dataset = "fineweb_edu"
n_layer, n_head, n_embd, block_size = 48, 25, 1600, 1024
batch_size = 8
gradient_accumulation_steps = 64
learning_rate, min_lr, beta2 = 2e-4, 2e-5, 0.95
max_iters = 20_000
warmup_iters = 1_000
eval_interval = 500
eval_iters = 64
compile = True
