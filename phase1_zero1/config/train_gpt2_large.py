# GPT-2 774M on OpenWebText with ZeRO-1: AdamW's moments take 6.2 GB, 0.8 GB on each of 8 ranks.
#   make phase1 GPUS=8 CONFIG=config/train_gpt2_large.py
dataset = "openwebtext"
n_layer, n_head, n_embd, block_size = 36, 20, 1280, 1024
batch_size = 8
gradient_accumulation_steps = 64
learning_rate, min_lr, beta2 = 2.5e-4, 2.5e-5, 0.95
max_iters = 200_000
warmup_iters = 2_000
eval_interval = 1_000
eval_iters = 64
compile = True
