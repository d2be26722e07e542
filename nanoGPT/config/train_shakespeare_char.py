# A character model of 10.7M parameters on Shakespeare, for one GPU. Training on a CPU is slow.
#   make baseline CONFIG=config/train_shakespeare_char.py
dataset = "shakespeare_char"
n_layer, n_head, n_embd, block_size = 6, 6, 384, 256
batch_size = 32
gradient_accumulation_steps = 16
dropout = 0.2
learning_rate, min_lr, beta2 = 1e-3, 1e-4, 0.99
max_iters = 1_000
warmup_iters = 100
eval_interval = 100
