"""The capstone: a trainer with four planted faults, which the learner must fix to restore the loss curve."""

import contextlib
import io
import json
from types import ModuleType
from typing import Any

from bench.phases import load_config_class
from phase1_zero1 import train as trainer
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


def train_small() -> dict[str, Any]:
    """Train a small model with phase 1 on all ranks, and return its metrics by step and rank 0's ledger."""
    with shared_folder() as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            config: Any = load_config_class("phase1")(**SETTINGS, out_dir=str(folder))
            trainer.train(config)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ledger = json.loads((folder / "ledger.json").read_text())
    return {"metrics": {line["step"]: line for line in lines}, "collectives": ledger["ranks"][0]["collectives"]}


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
]
