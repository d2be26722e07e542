# Fine-tune OpenAI's GPT-2 124M on Shakespeare with a small, constant learning rate.
#   make baseline CONFIG=config/finetune_shakespeare.py
init_from = "gpt2"
dataset = "shakespeare"
block_size = 1024
batch_size = 1
gradient_accumulation_steps = 32
learning_rate = min_lr = 3e-5
warmup_iters = 0
max_iters = 200
eval_interval = 20
