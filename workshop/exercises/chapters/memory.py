"""Exercises on the planner's formulas: parameters, FLOPs, model state and communication, compared with measurements."""

from workshop.exercises.checks.memory import (
    check_activations,
    check_cache_bytes,
    check_count,
    check_ddp_costs,
    check_fitting_slots,
    check_flops,
    check_fsdp_costs,
    check_fsdp_traffic,
    check_ring_bytes,
    check_zero_costs,
)
from workshop.exercises.exercise import Exercise, plant_mistake

EXERCISES = [
    Exercise(
        name="memory.1",
        title="Count the parameters of GPT-2",
        targets=("nanoGPT.model:GPTConfig.count_params",),
        task="""The planner computes with shapes only: it never builds the model. Return the number of parameters
        of a GPT from n_layer, n_embd, vocab_size, block_size and bias. The token embedding and the head are tied.""",
        minutes=10,
        difficulty="easy",
        check=check_count,
        nudge="Which matrices does a block have? Write each as a multiple of C * C.",
        idea="c_attn 3, c_proj 1, c_fc 4 and c_proj 4 times C * C; then embeddings, LayerNorms and biases.",
        line="block = 12",
        mistakes=(
            plant_mistake(
                "(self.vocab_size + self.block_size) * C", "(2 * self.vocab_size + self.block_size) * C", "tied"
            ),
            plant_mistake(
                "(self.vocab_size + self.block_size) * C", "self.vocab_size * C", "the position embedding is missing"
            ),
            plant_mistake("11 * C if self.bias", "9 * C if self.bias", "with biases"),
        ),
    ),
    Exercise(
        name="memory.2",
        title="Count the FLOPs per token",
        targets=("nanoGPT.model:GPTConfig.flops_per_token",),
        task="""Model FLOPs utilization compares a run with the peak of the device. Return the FLOPs of forward and
        backward pass per token, for the matrix products with N parameters and for attention over T = block_size
        tokens.""",
        minutes=10,
        difficulty="easy",
        check=check_flops,
        nudge="A matrix product has 2 FLOPs per weight and token. How many products does the backward pass add?",
        idea="6 N, where N excludes the position embedding, plus 12 L C T for the scores and their product with v.",
        line="return 6 * params",
        mistakes=(
            plant_mistake(
                " + 12 * self.n_layer * self.n_embd * self.block_size",
                "",
                "The attention scores are missing",
            ),
            plant_mistake(" - self.block_size * self.n_embd", "", "its rows are looked up"),
            plant_mistake("6 * params + 12", "2 * params + 4", "only the forward"),
        ),
    ),
    Exercise(
        name="memory.3",
        title="Predict the volume of a collective",
        targets=("nanoGPT.memory.costs:ring_bytes",),
        task="""The ledger and the planner compare strategies by the bytes that a rank sends with the ring
        algorithm. Return them for a full tensor of `tensor_bytes` bytes. For a
        broadcast, return the mean over the ranks: N - 1 ranks send the full tensor, and the last rank sends nothing.
        (The exercises collectives.1 to collectives.5 implement the ring, and collectives.5 returns the maximum
        instead.)""",
        minutes=5,
        difficulty="easy",
        check=check_ring_bytes,
        nudge="Which part of the tensor does a rank not have to send?",
        idea="(N-1)/N of the tensor, and twice as much for an all-reduce.",
        line="return (2 if",
        mistakes=(
            plant_mistake('(2 if kind == "all-reduce" else 1)', "1", "sends twice as much as either"),
            plant_mistake('(2 if kind == "all-reduce" else 1)', "2", "Only an all-reduce sends twice as much"),
            plant_mistake(" * (ranks - 1) / ranks", "", "You count the full tensor"),
        ),
    ),
    Exercise(
        name="memory.4",
        title="Predict the costs of ZeRO-1 and ZeRO-2",
        targets=("phase1_zero1.costs:flat_costs",),
        task="""Before you rent GPUs, you want to know what a rank stores and sends. Return the Costs of a step on
        N ranks with `micro_batches` per rank, from the buckets of an optimizer. bucket.COLLECTIVES names the two
        collectives of a bucket, and bucket.flat_params has its padded length. The check measures ZeRO-1 and ZeRO-2
        with the ledger.""",
        minutes=25,
        difficulty="hard",
        ranks=2,
        check=check_zero_costs,
        nudge="Which of parameters, gradients and moments are full, and which are a slice?",
        idea="Traffic: 4 bytes per element of each bucket, for the reduction and for the gather. Count padding, too.",
        line="traffic[reduce, N]",
        mistakes=(
            plant_mistake(" * (micro_batches if shards_gradients else 1)", "", "ZeRO-2 once per micro-batch"),
            plant_mistake(
                "4 * (local_length if shards_gradients else length)", "4 * length", "only its slice of the gradients"
            ),
            plant_mistake("        traffic[gather, N] += 4 * size\n", "", "is all-gathered once per step"),
        ),
    ),
    Exercise(
        name="memory.5",
        title="Predict the communication of FSDP",
        targets=("phase3_fsdp.costs:expected_traffic",),
        task="""FSDP sends more than ZeRO-1, because it all-gathers parameters in the forward and in the backward
        pass. Return the bytes of the full tensors in the collectives of one step, by kind and number of ranks.
        count_padded_elements(unit, ranks) counts the elements of a unit; muon_bytes_sent is for the optimizer
        Muon.""",
        minutes=25,
        difficulty="hard",
        ranks=2,
        check=check_fsdp_traffic,
        nudge="How often is a block all-gathered per micro-batch, and how often the root?",
        idea="Loop over the units; 2 gathers, or 1 for the root and without resharding; 1 reduction per step by "
        "default.",
        line="gathers =",
        mistakes=(
            plant_mistake("1 if unit is model or not config.fsdp_reshard_after_forward else 2", "2", "but the root"),
            plant_mistake(
                "micro_batches if config.fsdp_sync_every_micro_batch else 1", "1", "or after every micro-batch"
            ),
            plant_mistake(
                "size = count_padded_elements(unit, num_shards)",
                "size = sum(p.numel() for p in unit.parameters())",
                "you predict",
            ),
        ),
    ),
    Exercise(
        name="memory.6",
        title="Predict the activations of a model",
        targets=("phase3_fsdp.activation_bytes:activation_bytes",),
        task="""Activations often need more memory than the sharded model state. saved_activations lists what one
        block saves in the modes none, full and selective, and saved_activations_outside_blocks lists the rest.
        Return the bytes of the full model for a value of --fsdp_activation_checkpointing, which selects the blocks
        to recompute.""",
        minutes=10,
        difficulty="medium",
        check=check_activations,
        nudge="With every_2, which mode does block 1 have?",
        idea="select_checkpointed_blocks returns the recomputed blocks; all others have the mode none.",
        line="block_modes =",
        mistakes=(
            plant_mistake(
                'checkpointed_mode if i in blocks else "none"', "checkpointed_mode", "add the tensors of each block"
            ),
            plant_mistake('"selective" if mode == "selective" else "full"', '"full"', "With the mode selective"),
        ),
    ),
    Exercise(
        name="memory.7",
        title="Predict the costs of DDP",
        targets=("nanoGPT.memory.costs:step_costs",),
        task="""All other methods are compared with DDP, which shards nothing. Return the Costs of a step on
        run.world_size ranks: the bytes of parameters, gradients and optimizer_state on a rank, and the bytes of the
        full tensors that are all-reduced, by kind and number of ranks. optimizer_bytes(optimizer) predicts the
        optimizer state. has_gradient_buffers is True if there is more than one rank, because DDP keeps its buckets. The
        check measures all of them with the ledger.""",
        minutes=10,
        difficulty="easy",
        ranks=2,
        check=check_ddp_costs,
        nudge="Which of parameters, gradients and moments does DDP shard?",
        idea="4 bytes per parameter for the parameters, the same for the gradients; one all-reduce of the gradients.",
        line="traffic = Counter",
        mistakes=(
            plant_mistake('"gradients": size,', '"gradients": size // run.world_size,', "all gradients"),
            plant_mistake("size} if run.world_size > 1", "2 * size} if run.world_size > 1", "before the factors"),
            plant_mistake(" if run.world_size > 1 else {})", ")", "A single rank communicates nothing"),
            plant_mistake("optimizer_bytes(optimizer)}", "2 * size}", "step count"),
        ),
    ),
    Exercise(
        name="memory.8",
        title="Predict the model state of FSDP",
        targets=("phase3_fsdp.costs:step_costs",),
        task="""FSDP shards parameters, gradients and moments. With --fsdp_shard_size=2 on 4 ranks, two ranks share one
        copy of the model, and there are two copies. Return the Costs of a step: the bytes of state of this rank, the
        traffic (expected_traffic predicts it), and the number of padding elements. FSDP pads the rows of each
        parameter to a multiple of the shards; count_padded_elements(unit, num_shards) counts the elements of an
        FSDP unit. ddp_costs predicts the costs with use_fsdp=False. With CPU offload on a GPU, each gradient is
        copied without padding.""",
        minutes=20,
        difficulty="medium",
        ranks=4,
        check=check_fsdp_costs,
        nudge="Over how many ranks is a parameter sharded? The last dimension of its device mesh knows it.",
        idea="Add the padded elements of all units, and divide by the number of shards. Parameters and gradients have "
        "4 bytes each.",
        line="elements = sum",
        mistakes=(
            plant_mistake('"parameters": 4 * elements // num_shards', '"parameters": 4 * elements', "only its shards"),
            plant_mistake("params[0].device_mesh.size(-1)", "run.world_size", "two copies"),
            plant_mistake(
                "sum(count_padded_elements(unit, num_shards) for unit in model.modules() if isinstance(unit, "
                "FSDPModule))",
                "sum(p.numel() for p in params)",
                "multiple of the number of shards",
            ),
        ),
    ),
    Exercise(
        name="memory.9",
        title="Predict the key-value cache",
        targets=("phase3_fsdp.solve.costs:cache_bytes",),
        task="""A model that generates text keeps the keys and values of all earlier tokens. Return their bytes for one
        sequence of `tokens` tokens. size.layers has one entry per layer, and size.kv_channels is the number of key
        channels in one layer, which may be smaller than size.channels.""",
        minutes=5,
        difficulty="easy",
        check=check_cache_bytes,
        nudge="Which tensors does attention need again for each new token, and in which layers?",
        idea="Two tensors per layer, each with kv_channels numbers per token.",
        line="return 2 * len(size.layers)",
        mistakes=(
            plant_mistake("2 * len(size.layers)", "len(size.layers)", "keys and values"),
            plant_mistake("2 * len(size.layers) * tokens", "2 * tokens", "Every layer"),
            plant_mistake("size.kv_channels", "size.channels", "share keys"),
        ),
    ),
    Exercise(
        name="memory.10",
        title="Find the largest batch that fits",
        targets=("phase3_fsdp.solve.costs:find_fitting_slots",),
        task="""A model generates text for several sequences at a time. If `slots` sequences need too much memory, the
        error message names the largest number that fits. Return it: below `slots`, and 0 if not even one sequence
        fits. A batch fits if one of the SPREADS needs at most `limit` bytes; predict(...).memory is the memory per
        rank. The spread "tp" is possible only if size.kv_heads is positive and a multiple of the ranks.""",
        minutes=10,
        difficulty="medium",
        check=check_fitting_slots,
        nudge="Which numbers do you try, in which order, and when do you stop?",
        idea="Try slots - 1, slots - 2, ..., 1, and return the first number for which any possible spread fits.",
        line="for count in range",
        mistakes=(
            plant_mistake("range(slots - 1, 0, -1)", "range(1, slots)", "the smallest"),
            plant_mistake("if any(predict", "if all(predict", "one spread that fits is enough"),
            plant_mistake(
                '[each for each in SPREADS if each != "tp" or (size.kv_heads > 0 and size.kv_heads % ranks == 0)]',
                "list(SPREADS)",
                "cannot be divided",
            ),
        ),
    ),
]
