# One command a job. `make` alone lists them; every variable below can be given on the command line.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
GPUS ?= 1
NNODES ?= 1
NODE_RANK ?= 0
MASTER_ADDR ?= 127.0.0.1
DEVICE ?=
CONFIG ?=
DATASET ?=
MODEL ?= gpt2
GPU ?= h100
SUITE ?= scaling
PHASE ?= phase3
TO ?=
ARGS ?=

PY := .venv/bin/python
LAUNCH = $(PY) -m nanoGPT.launch --gpus=$(GPUS) --nnodes=$(NNODES) --node_rank=$(NODE_RANK) --master_addr=$(MASTER_ADDR)
FLAGS = $(CONFIG) $(if $(DATASET),--dataset=$(DATASET)) $(if $(DEVICE),--device=$(DEVICE)) $(ARGS)
PREPARED := $(patsubst %prepare.py,%meta.json,$(wildcard $(foreach name,shakespeare_char shakespeare $(DATASET),nanoGPT/data/$(name)/prepare.py)))

.PHONY: help setup data baseline phase1 phase2 phase3 sample verify-checkpoint test test-fast lint notebooks diff1 diff2 diff3
.PHONY: plan profile suite matrix bench bench-kernels bench-fsdp bench-save torture tables clean copy

help:  ## list the commands
	@echo "make COMMAND [GPUS=4] [DEVICE=cpu] [CONFIG=config/name.py] [DATASET=name] [ARGS='--key=value ...']"
	@echo "several nodes: the same command on each, with NNODES=2 NODE_RANK=0 MASTER_ADDR=host"
	@echo
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-18s %s\n", $$1, $$2}'

# A stamp names the directory and the Python that .venv was made for. If either has changed, or a set-up was
# interrupted, the stamp depends on a target that does not exist.
STALE := $(shell [ ! -e .venv/.unfinished ] && { { IFS= read -r root && IFS= read -r python; } <.venv/.core; } 2>/dev/null \
	&& [ "$$root" -ef . ] && [ "$$python" -ef .venv/bin/python ] || echo stale-venv)
.PHONY: $(STALE)

# What these rules write is complete when it appears: an interrupt or a failure after that must not delete it.
.PRECIOUS: .venv/.core .venv/.dev nanoGPT/data/%/meta.json

.venv/.core: pyproject.toml constraints.txt $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) workshop/set_up.py core

.venv/.dev: .venv/.core
	@$(PYTHON) workshop/set_up.py dev

nanoGPT/data/%/meta.json: nanoGPT/data/%/prepare.py nanoGPT/prepare/text.py | .venv/.core
	@$(PY) $< && touch $@

setup: .venv/.core  ## make .venv and install the project into it
data: $(PREPARED)  ## prepare Shakespeare, as characters and as GPT-2 tokens, and DATASET
baseline: .venv/.core data  ## train the baseline: one process, or DDP on GPUS ranks
	@$(LAUNCH) nanoGPT/train.py $(FLAGS)
phase1: .venv/.core data  ## the same with ZeRO-1: sharded optimizer state
	@$(LAUNCH) phase1_zero1/train.py $(FLAGS)
phase2: .venv/.core data  ## the same with Triton kernels
	@$(LAUNCH) phase2_triton/train.py $(FLAGS)
phase3: .venv/.core data  ## the same with FSDP: sharded parameters, gradients and optimizer state
	@$(LAUNCH) phase3_fsdp/train.py $(FLAGS)
sample: .venv/.core  ## text from the newest run under out/, or from ARGS=--out_dir=DIR
	@$(PY) -m nanoGPT.sample $(if $(DEVICE),--device=$(DEVICE)) $(ARGS)
verify-checkpoint: .venv/.core  ## read every checkpoint of ARGS=--out_dir=DIR to the last byte
	@$(PY) -m nanoGPT.checkpoint.verify $(ARGS)
test: .venv/.dev data  ## run the tests (DEVICE=cuda for those that need a GPU)
	@$(PY) -m pytest $(if $(DEVICE),--device=$(DEVICE)) $(ARGS)
test-fast: .venv/.dev data  ## run the tests that start no processes and take no seconds; under a minute
	@$(PY) -m pytest -m "not slow and not ranks and not heavy" $(ARGS)
lint: .venv/.dev  ## ruff and mypy
	@$(PY) -m ruff check . && $(PY) -m ruff format --check --exclude notebooks . && $(PY) -m mypy
notebooks: .venv/.dev data  ## run every notebook script and write the .ipynb beside it
	@$(PY) -m workshop.notebooks $(ARGS)
copy: .venv/.core data  ## PHASE=phase3 and the modules that it imports, as a directory TO=DIR that runs alone
	@$(PY) -m workshop.copy_phase --phase=$(PHASE) --to=$(TO)
diff1: .venv/.core  ## what phase 1 changes in the baseline's train.py, hunk by hunk
	@$(PY) -m workshop.diff phase1_zero1
diff2: .venv/.core  ## what phase 2 changes in the baseline's train.py, hunk by hunk
	@$(PY) -m workshop.diff phase2_triton
diff3: .venv/.core  ## what phase 3 changes in the baseline's train.py, hunk by hunk
	@$(PY) -m workshop.diff phase3_fsdp
plan: .venv/.core  ## will MODEL fit on GPUS of kind GPU, and how fast will it go? every phase, planned with no GPU
	@$(PY) -m bench.plan --model=$(MODEL) --gpus=$(GPUS) --gpu=$(GPU) $(ARGS)
profile: .venv/.core data  ## PHASE=phase3's timeline, overlap, memory and costliest operators on GPUS ranks
	@OMP_NUM_THREADS=1 $(PY) -m bench.trainer.profile_step $(PHASE) $(GPUS) $(ARGS)
suite: .venv/.dev data  ## run SUITE=scaling, memory, wrapping, kernels, optimizers, seeds or all; continues after a kill
	@OMP_NUM_THREADS=1 $(PY) -m bench.suite --suite=$(SUITE) $(ARGS)
matrix: .venv/.dev data  ## every phase on 1, 2, 4 and 8 ranks, and every option: losses, bytes, memory, time
	@OMP_NUM_THREADS=1 $(PY) -m bench.matrix $(ARGS)
	@$(PY) -m bench.tables
bench: .venv/.dev data  ## measure every phase end to end, a step against a bare loop, and ZeRO-1
	@OMP_NUM_THREADS=1 $(PY) -m bench.trainer.throughput $(ARGS)
	@$(PY) -m bench.trainer.step_overhead $(ARGS)
	@OMP_NUM_THREADS=1 $(PY) -m bench.sharding.zero1 $(ARGS)
	@OMP_NUM_THREADS=1 $(PY) -m bench.sharding.zero1_step $(ARGS)
bench-kernels: .venv/.dev data  ## measure every kernel and the trainer with each; without a GPU reduced and interpreted
	@OMP_NUM_THREADS=1 $(PY) -m bench.kernels $(ARGS)
	@$(PY) -m bench.kernels.ablation $(ARGS)
	@$(PY) -m bench.kernels.plots
bench-fsdp: .venv/.dev data  ## every option of FSDP with every other: losses, traffic and state; 45 minutes
	@OMP_NUM_THREADS=1 $(PY) -m bench.sharding.fsdp_options $(ARGS)
bench-save: .venv/.dev  ## a verified checkpoint beside a bare one, and in the background
	@OMP_NUM_THREADS=1 $(PY) -m bench.checkpoints.save_speed $(ARGS)
torture: .venv/.dev  ## kill saves at every point and at 500 random moments, flip 200 bits, and open what is left
	@OMP_NUM_THREADS=1 $(PY) -m bench.checkpoints.torture $(ARGS)
tables: .venv/.dev  ## put the committed results into the documents' tables
	@$(PY) -m bench.tables $(ARGS)
clean:  ## delete caches; prepared data, .venv and out/ stay
	@rm -rf .pytest_cache .mypy_cache .ruff_cache *.egg-info
	@find . \( -path ./.venv -o -path ./out \) -prune -o -name __pycache__ -prune -exec rm -rf {} +
