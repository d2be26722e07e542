"""The capstone: a trainer with four planted faults that change the loss curve, and one with three that only cost."""

import contextlib
import io
import json
from types import ModuleType
from typing import Any

from bench.phases import load_config_class
from operate.run_files import read_json_lines
from phase1_zero1 import train as zero1_trainer
from phase3_fsdp import train as fsdp_trainer
from workshop.exercises.exercise import Exercise, Mistake, expect, plant_mistake
from workshop.exercises.measuring import shared_folder

SETTINGS: dict[str, Any] = {
    "dataset": "shakespeare_char",
    "device": "cpu",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "block_size": 16,
    "batch_size": 2,
    "gradient_accumulation_steps": 4,
    "dropout": 0.2,
    "learning_rate": 2e-2,
    "min_lr": 2e-3,
    "grad_clip": 0.3,
    "max_iters": 8,
    "warmup_iters": 2,
    "eval_interval": 8,
    "eval_iters": 4,
    "log_interval": 1,
    "ledger": True,
}
TOLERANCE = 1e-6  # nats; rounding differences are smaller

LOCAL_NORM = plant_mistake(
    "norm = grad_norm(grads, optimizer.shard_group) / scaler.scale",
    "norm = grad_norm(grads) / scaler.scale",
    "the ledger",
)
SEED_OF_RANK = plant_mistake(
    "reseed(run.device, config.seed, step, micro_batch)",
    "reseed(run.device, config.seed + run.rank, step, micro_batch)",
    "a training step also draws random numbers",
)
NO_MASK = plant_mistake(
    "y = self.attend(q, k, v, cache)  # (B, nh, T, hs)",
    "y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)",
    "only the forward pass",
)
REENTRANT = Mistake(
    (
        (
            "return x + self.mlp(self.ln_2(x))",
            "# Recompute LayerNorm in the backward pass, one half of the batch at a time, to save memory.\n        "
            "halves = [checkpoint(self.ln_2, half, use_reentrant=True) for half in x.chunk(2)]\n        return x + "
            "self.mlp(torch.cat(halves))",
        ),
        (
            "from torch import Tensor, nn\n",
            "from torch import Tensor, nn\nfrom torch.utils.checkpoint import checkpoint\n",
        ),
    ),
    "a second backward() ran",
)
FAULTS = (LOCAL_NORM, SEED_OF_RANK, NO_MASK, REENTRANT)

REDUCE_EACH = plant_mistake(
    "last=micro_batch == micro_batches[-1]", "last=micro_batch >= micro_batches[0]", "reduce-scatter"
)
KEEP_GRADIENTS = plant_mistake("set_to_none=True", "set_to_none=False", "between two steps")
LARGE_ROOT = plant_mistake("in reversed(units):", "in reversed(units[1:]):", "still all-gathered")
COSTLY_FAULTS = (REDUCE_EACH, KEEP_GRADIENTS, LARGE_ROOT)


def train_small(phase: str = "phase1") -> dict[str, Any]:
    """Train a small model on all ranks, and return its metrics by step, and rank 0's collectives and memory."""
    trainer = {"phase1": zero1_trainer, "phase3": fsdp_trainer}[phase]
    with shared_folder() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            config: Any = load_config_class(phase)(**SETTINGS, out_dir=str(folder))
            trainer.train(config)
        lines = read_json_lines(folder / "metrics.jsonl")
        ledger = json.loads((folder / "ledger.json").read_text())["ranks"][0]
    return {"metrics": {line["step"]: line for line in lines}, **ledger}


def describe_curves(actual: dict[int, Any], expected: dict[int, Any]) -> str:
    """Return a table of the losses of all steps."""
    rows = [
        f"    step {step}: {values['loss']:.6f}, expected {expected[step]['loss']:.6f}"
        for step, values in actual.items()
        if values["loss"] is not None
    ]
    return "\n".join(rows)


def check_capstone(answer: ModuleType, expected: dict[str, Any]) -> None:
    result = train_small()
    actual, reference = result["metrics"], expected["metrics"]
    table = describe_curves(actual, reference)

    def differs(name: str, step: int) -> bool:
        return abs(actual[step][name] - reference[step][name]) > TOLERANCE

    expect(
        not differs("val_loss", 0),
        f"The validation loss before the first step is {actual[0]['val_loss']:.6f} instead of "
        f"{reference[0]['val_loss']:.6f}. There has been no update, and an evaluation has no dropout: only the "
        f"forward pass can be wrong.\n{table}",
    )
    expect(
        not differs("loss", 0),
        "The validation loss before the first step is right, but the training loss of step 0 is not. The forward "
        f"pass is the same, but a training step also draws random numbers.\n{table}",
    )
    for row in result["collectives"]:
        expect(
            row["tensor_bytes"] == row["expected_bytes"],
            f"The loss of step 0 is right, but the ledger counts {row['tensor_bytes']:,} bytes of {row['kind']} in "
            f"{row['calls']} calls, and the formula has {row['expected_bytes']:,}: compare the missing bytes with "
            f"the formulas in phase1_zero1/costs.py.\n{table}",
        )
    wrong = [step for step, values in actual.items() if values["loss"] is not None and differs("loss", step)]
    expect(
        not wrong,
        f"The losses of the steps {wrong} differ from the expected loss curve, so an update is wrong.\n{table}",
    )


def check_costs(answer: ModuleType, expected: dict[str, Any]) -> None:
    result = train_small("phase3")
    losses, right_losses = ([line["loss"] or 0.0 for line in each["metrics"].values()] for each in (result, expected))
    expect(
        all(abs(a - b) <= TOLERANCE for a, b in zip(losses, right_losses, strict=True)),
        f"The losses were right, and must stay so.\n{describe_curves(result['metrics'], expected['metrics'])}",
    )
    pairs = zip(result["collectives"], expected["collectives"], strict=True)
    for row, right in sorted(pairs, key=lambda pair: pair[0]["kind"] != "reduce-scatter"):
        expect(
            row["tensor_bytes"] <= right["tensor_bytes"],
            f"The losses are right, but a step has {row['tensor_bytes']:,} bytes in {row['calls']} calls of "
            f"{row['kind']}, where {right['tensor_bytes']:,} are enough.",
        )
    kept, right_kept = (each["memory"]["after_step"]["gradients"] for each in (result, expected))
    expect(
        kept <= right_kept,
        f"The losses and the communication are right, but {kept:,} bytes of gradients stay between two steps.",
    )
    gathered, right_gathered = (each["memory"]["after_forward"]["gathered"] for each in (result, expected))
    expect(
        gathered <= right_gathered,
        f"The losses are right, and nothing stays between the steps, but {gathered:,} bytes are still all-gathered at "
        f"the end of a forward pass, where {right_gathered:,} are enough.",
    )


EXERCISES = [
    Exercise(
        name="capstone",
        title="Fix four faults of a trainer, and restore its loss curve",
        targets=("phase1_zero1.train:train_step", "nanoGPT.model:CausalSelfAttention", "nanoGPT.model:Block"),
        task="""This file contains parts of the trainer of phase 1 with four planted faults. After your fixes, two
        ranks must print the same losses as the repository's trainer, which are the same on every number of ranks.

        Do not compare the code with the repository's. The check trains, and reports what an engineer would see: an
        exception with its stack, the ledger, and the losses. Find the cause of one symptom at a time.""",
        minutes=40,
        difficulty="advanced",
        ranks=2,
        check=check_capstone,
        prepare=train_small,
        nudge="Order the symptoms: exception, evaluation before step 0, loss of step 0, ledger, later losses.",
        idea="Ask of each symptom which part of a step can cause it: the backward pass, the forward pass, the "
        "random numbers of the forward pass, or the update.",
        line="norm = grad_norm",
        planted=(Mistake(tuple(edit for fault in FAULTS for edit in fault.edits), "a second backward() ran"),),
        mistakes=FAULTS,
        limit=60.0,
    ),
    Exercise(
        name="capstone.2",
        title="Find three costs that no loss shows",
        targets=("phase3_fsdp.train:train_step", "phase3_fsdp.fsdp:shard_units"),
        task="""This file contains parts of the trainer of phase 3 with three planted faults. All losses are right. A
        step sends too much, stores too much, or has too much all-gathered. The check trains on two ranks
        with two micro-batches each, and compares the ledger of rank 0 with that of the repository's trainer.""",
        minutes=30,
        difficulty="advanced",
        ranks=2,
        check=check_costs,
        prepare=lambda: train_small("phase3"),
        nudge="How many micro-batches of a step must reduce gradients? What exists after the update? What is a unit?",
        idea="Read the arguments of set_gradient_sync and of zero_grad, and ask which modules become units.",
        line="for unit in reversed",
        planted=(Mistake(tuple(edit for fault in COSTLY_FAULTS for edit in fault.edits), "reduce-scatter"),),
        mistakes=COSTLY_FAULTS,
        limit=60.0,
    ),
]
