# %% [markdown]
# # 0. Start here
#
# *15 minutes. You need a terminal and this repository, but no GPU. No notebook comes before this one.*
#
# This notebook answers three questions: **Does my set-up work? Where is what? How do I work with the exercises?**
#
# You start real ranks, make a prediction and compare it with a measurement, and read how a program explains a wrong
# answer.
#
# If you read this in a browser and nothing is installed yet, run these two commands in the repository. `make notebooks`
# creates `.venv`, installs everything into it, prepares the data, and opens the notebooks:
#
# ```bash
# make setup TORCH=cpu      # without an NVIDIA GPU; it is a smaller download
# make notebooks
# ```
#
# **In VS Code:** run `make notebooks` once, stop it with Ctrl+C, open the directory of the repository and a notebook,
# and select the Python of `.venv` as the Jupyter kernel.
#
# **Without a laptop: Google Colab.** Put the repository on GitHub, replace OWNER and NAME by your own, and open
# `https://colab.research.google.com/github/OWNER/NAME/blob/main/notebooks/00_start_here.ipynb`. Run this in a first
# cell, and then restart the session (menu Runtime):
#
# ```
# !git clone --depth=1 https://github.com/OWNER/NAME /content/course
# %cd /content/course
# %pip install -e .
# !python nanoGPT/data/shakespeare_char/prepare.py
# !python nanoGPT/data/shakespeare/prepare.py
# !python nanoGPT/data/synthetic/prepare.py
# ```
#
# Colab gives each notebook a new machine, so run this first in every notebook that you open there. If Colab's PyTorch
# is older than 2.11, pip replaces it. This takes some minutes, and you can ignore pip's warnings about torchvision
# and torchaudio. **Nobody has tried this in Colab yet.** Its versions of PyTorch and Triton may give slightly other
# outputs.

# %%
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from nanoGPT.files import PACKAGE
from nanoGPT.costs import ring_bytes
from measure.ledger import CollectiveCounter
from workshop.exercises.checking import check_file
from workshop.exercises.registry import CHAPTERS, find_exercise
from workshop.pictures import draw_who_holds_what
from workshop.ranks import RankFailed, run_on_ranks

# %% [markdown]
# ## a. Does my set-up work?
#
# You will check everything that the other notebooks need. Each check that fails prints a remedy.
#
# A *rank* is a process that trains a model together with other processes. On a server, each rank has a GPU. On your
# laptop, ranks are ordinary processes on the CPU, and they communicate through a library called gloo. The last check
# starts four ranks. Each gives its number, and an *all-reduce*, an operation that all ranks call together, adds
# them: 0 + 1 + 2 + 3 = 6.

# %%
def add_rank_numbers() -> float:
    """Return the sum of the numbers of all ranks, which an all-reduce computes."""
    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


def can_communicate() -> bool:
    try:
        return run_on_ranks(add_rank_numbers, 4) == [6.0] * 4
    except RankFailed as failure:
        print(failure)
        return False


# %%
has_data = all((PACKAGE / "data" / name / "meta.json").is_file() for name in ("shakespeare_char", "shakespeare"))
gigabytes_free = shutil.disk_usage(PACKAGE).free / 1e9
checks = {
    "Python is 3.11 or newer": (sys.version_info >= (3, 11), "make setup PYTHON=/path/to/python3.11"),
    "the data is prepared": (has_data, "make data"),
    "2 GB of the disk are free": (gigabytes_free > 2, "delete old runs under out/"),
    "there are 2 cores or more": ((os.cpu_count() or 1) >= 2, "everything works, but more slowly"),
    "Triton is installed": (importlib.util.find_spec("triton") is not None, "only notebooks 4, 4b and 5 need it (Linux)"),
    "4 ranks communicate": (can_communicate(), "allow connections to 127.0.0.1 in your firewall"),
}
for name, (is_ok, remedy) in checks.items():
    print(f"{'ok     ' if is_ok else 'PROBLEM'}  {name}" + ("" if is_ok else f": {remedy}"))
assert checks["the data is prepared"][0] and checks["4 ranks communicate"][0]

# %% [markdown]
# ## b. Where is what?
#
# The repository contains four versions of one trainer. Each version after the first adds one idea. You need four
# words: a *collective* is an operation that all ranks call together. To *shard* a tensor is to divide it into N
# parts, one for each of N ranks. AdamW stores two *moments* per parameter, running averages of the gradient and of
# its square. A *kernel* is a function that runs on the GPU. [The glossary](../docs/glossary.md) defines all terms.
#
# | directory | the idea | the question that it answers |
# |---|---|---|
# | `nanoGPT/` | the baseline: one process, or DDP (every rank trains the full model on its own part of the data) | How do several processes train one model? |
# | `phase1_zero1/` | ZeRO-1: shard the optimizer state | Why does every rank store the same moments? |
# | `phase2_triton/` | kernels written in Triton | Why does a fast GPU wait for memory most of the time? |
# | `phase3_fsdp/` | FSDP: shard everything | How do we train a model that fits on no GPU? |
#
# The other directories help you: `notebooks/` explains, `workshop/` checks your answers, `bench/` measures and plans,
# `operate/` diagnoses runs, and `docs/` describes all of it. `make` alone lists every command.
#
# The main question of the course is: **who stores what?** The picture answers it. Training with AdamW needs
# parameters (p), gradients (g) and optimizer state (o). There are four ranks, and each tensor is drawn as four parts.
#
# **Predict first:** before you look at the picture, sketch the rows for DDP, ZeRO-1 and FSDP when the
# optimizer runs.

# %%
FULL, SHARD = ["0123"] * 4, ["0...", ".1..", "..2.", "...3"]
draw_who_holds_what(
    {
        "DDP: parameters": FULL, "DDP: gradients": FULL, "DDP: optimizer state": FULL,
        "ZeRO-1: parameters": FULL, "ZeRO-1: gradients": FULL, "ZeRO-1: optimizer state": SHARD,
        "FSDP: parameters": SHARD, "FSDP: gradients": SHARD, "FSDP: optimizer state": SHARD,
    },
    "What each of four ranks stores when the optimizer runs",
)

# %% [markdown]
# With DDP every rank stores everything. ZeRO-1 shards the optimizer state, and FSDP shards all three. (The Triton
# kernels of phase 2 change how the model computes, and not who stores what.)
#
# ## c. The chapters
#
# Read the chapters in this order. A chapter takes as long as the table says if you make the predictions.
#
# | chapter | minutes | read before it | its question |
# |---|---:|---|---|
# | [1. One process, then multiple ranks](01_one_process.ipynb) | 45 | - | Why is the loss curve the same on 1, 2 and 4 ranks? |
# | [2. Collectives](02_collectives.ipynb) | 50 | 1 | What do ranks send, how much, and how long does it take? |
# | [3. ZeRO-1](03_zero1.ipynb) | 40 | 1 | Can we shard the optimizer state for free? |
# | [3b. Overlap and clipping](03b_overlap_and_clipping.ipynb) | 25 | 3 | Which mistakes are invisible in a loss curve? |
# | [4. Triton](04_triton.ipynb) | 55 | 1 | How do we write and check a kernel? |
# | [4b. Compiled kernels](04b_compiled_kernels.ipynb) | 35 | 4 | How fast can a kernel be? |
# | [5. Inside a GPU](05_triton_attention.ipynb) | 60 | 4, 4b | How do matrix products and attention read less memory? |
# | [6. FSDP](06_fsdp.ipynb) | 45 | 3 | What does it cost to shard the parameters as well? |
# | [6b. Activation checkpointing](06b_activation_checkpointing.ipynb) | 25 | 6 | Which activations can be recomputed? |
# | [7. Checkpoints and faults](07_checkpoints_and_faults.ipynb) | 45 | 6 | What remains after a kill? |
# | [8. Generating text](08_generating_text.ipynb) | 20 | 6 | Is FSDP a good way to generate text? |
# | [9. Mixed precision](09_mixed_precision.ipynb) | 35 | 3b | Where are 16 bits enough? |
# | [10. Will it fit?](10_will_it_fit.ipynb) | 45 | 6b | How much memory does a run need, before it runs? |
# | [11. What comes next](11_what_comes_next.ipynb) | 60 | 2, 5, 6, 8 | What else can we divide among ranks? |
# | [12. Measuring](12_measuring.ipynb) | 40 | 1 | When can I trust a time or a number of bytes? |
#
# In half a day, read 1, 3 and 6. In a day, read 1, 2, 3, 3b, 6 and 6b, and solve their exercises of the core track
# (`docs/exercises.md`). If you work alone, take one chapter per evening, and solve its exercises before you start the
# next one.
#
# ## d. Predict, then measure
#
# Every chapter asks you to **predict first**. Write your number down before you look at the output. (*Edit > Clear
# Outputs of All Cells* in JupyterLab hides the outputs. Then run one cell at a time.) A wrong prediction shows you
# which part of your mental model to fix, so it teaches more than a right one.
#
# Here is a first one. Each of N = 4 ranks has a tensor with one million numbers in fp32 (32-bit floating point, 4
# bytes each): n = 4 MB. An all-reduce replaces all four by their sum. In the *ring algorithm*, the ranks form a ring,
# each tensor has four parts, and in each step a rank sends one part (n/N = 1 MB) to the next rank. After 3 steps, each
# rank has one part of the sum. In 3 more steps, the finished parts are copied around the ring, and each rank has all of
# it.
#
# **Predict first:** how many MB does each rank send: 4, 6, 8 or 12?

# %%
def count_sent_bytes() -> float:
    """All-reduce a million numbers. Return the bytes that a ring sends for the collectives that were really called."""
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(1_000_000))
    return sum(row["ring_bytes"] for row in counter.rows.values())


counted = run_on_ranks(count_sent_bytes, 4)[0]
formula = ring_bytes("all-reduce", 4e6, 4)
print(f"from the collectives that were called {counted / 1e6:.0f} MB, formula 2n(N-1)/N = {formula / 1e6:.0f} MB")
assert counted == formula

# %% [markdown]
# Each rank sends 6 MB. It sends 3 MB (three quarters of the tensor) in a reduce-scatter, which computes the sums, and
# another 3 MB in an all-gather, which copies the sums to all ranks. Chapter 2 writes both with send and receive, and
# counts what is really sent. The *ledger* of this repository counts the collectives of a training step and the sizes of
# their tensors, and compares them with the formula of the phase.
#
# ## e. Something broken on purpose
#
# Every chapter also breaks something, because you will meet these mistakes in your own work. The most common one: a
# collective that only some ranks call.
#
# **Predict first:** rank 0 calls an all-reduce, and ranks 1 to 3 do not. Do you get an error, a wrong sum, or neither?

# %%
def reduce_on_rank_0_only() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))  # the bug: the other ranks never call it


try:
    run_on_ranks(reduce_on_rank_0_only, 4, timeout=2)
    raise AssertionError("the ranks should wait for each other")
except RankFailed as failure:
    print(failure)

# %% [markdown]
# Neither: the ranks wait for each other until a time limit ends the run. (After each function, the helper of the
# notebooks calls a barrier, a collective that waits until all ranks have called it. Rank 0 waits in the all-reduce, and
# the others wait in the barrier.) When a run hangs, this is
# the first thing to look for. The trainers have a watchdog that names the rank and the line.
#
# ## f. How to work with the exercises
#
# In an exercise you write a part of this repository again, and a program checks your code on real ranks. Type the
# commands in a terminal:
#
# ```bash
# make exercise                      # list the exercises
# make exercise N=memory.3           # write the task and a stub into work/memory_3.py
# make check N=memory.3              # run your code, and explain what is wrong
# make hint N=memory.3 LEVEL=1       # a nudge; LEVEL=2: the idea; LEVEL=3: the decisive line
# make solution N=memory.3           # print the repository's own code
# ```
#
# The table counts the exercises of each chapter:

# %%
print("chapter        exercises   minutes   first exercise")
for chapter, exercises in CHAPTERS.items():
    minutes = sum(each.minutes for each in exercises)
    print(f"{chapter:13} {len(exercises):10} {minutes:9}   {exercises[0].name}: {exercises[0].title}")

# %% [markdown]
# Here is what `make check` says about a wrong answer to `memory.3`, which asks for the communication volume of
# any collective (`kind`), not only of the all-reduce of section (d).
#
# **Predict first:** what is wrong with this answer?

# %%
ANSWER = '''
def ring_bytes(kind: str, tensor_bytes: float, ranks: int) -> float:
    return 2 * tensor_bytes * (ranks - 1) / ranks
'''
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "memory_3.py"
    path.write_text(ANSWER)
    verdict = check_file(find_exercise("memory.3"), path)
print("right" if verdict.is_right else f"memory.3 is not right yet:\n{verdict.explanation}")
assert not verdict.is_right

# %% [markdown]
# The check ran the answer, found the difference, and named the reason. An exercise never hangs: after a time limit,
# the check shows the line in which each rank waits.
#
# Rules that help:
#
# - Try for as long as the table says before you read the second hint.
# - Read the solution also when your answer is right. It may be shorter.
# - Your files are in `work/`. Git ignores this directory, and no command overwrites your files.
#
# ## Exercises
#
# | exercise | task | minutes |
# |---|---|---:|
# | `memory.3` | predict the volume of a collective | 5 |
#
# ## To take home
#
# 1. A rank is a process. All ranks run the same program, with different numbers.
# 2. Ranks work together through collectives, and every rank must call them.
# 3. If only some ranks call a collective, the run hangs. There is no error until a time limit ends it.
# 4. The question of the course is: who stores what, and when?
# 5. DDP stores everything on every rank, ZeRO-1 shards the optimizer state, and FSDP shards everything.
# 6. Predict a number before you look at it.
# 7. Every formula here is compared with what the ranks really call and store.
# 8. One loss curve: sharding must not change the losses. If the curve changes, something is broken.
# 9. `make` lists the commands, `make exercise` lists the exercises, and `docs/glossary.md` defines the words.
# 10. Nothing needs a GPU, and the same commands run on one.
