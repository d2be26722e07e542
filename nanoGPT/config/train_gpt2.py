# GPT-2 124M on OpenWebText, as in nanoGPT: 0.49M tokens per step, 600,000 steps.
#   make baseline GPUS=8 CONFIG=config/train_gpt2.py
dataset = "openwebtext"
n_layer, n_head, n_embd, block_size = 12, 12, 768, 1024
batch_size = 10
gradient_accumulation_steps = 48
learning_rate, min_lr, beta2 = 6e-4, 6e-5, 0.95
max_iters = 600_000
warmup_iters = 2_000
eval_interval = 1_000
eval_iters = 200
compile = True
