# GPT-2 350M on OpenWebText with Triton kernels: half a million tokens per step, as for the other model sizes.
#   make phase2 GPUS=8 CONFIG=config/train_gpt2_medium.py
dataset = "openwebtext"
n_layer, n_head, n_embd, block_size = 24, 16, 1024, 1024
batch_size = 16
gradient_accumulation_steps = 32
learning_rate, min_lr, beta2 = 3e-4, 3e-5, 0.95
max_iters = 200_000
warmup_iters = 2_000
eval_interval = 1_000
eval_iters = 64
compile = True
