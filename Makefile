# One target per job. `make` alone lists the targets. Every variable below can be set on the command line.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
GPUS ?= 1
NNODES ?= 1
NODE_RANK ?= 0
MASTER_ADDR ?= 127.0.0.1
DEVICE ?=
TORCH ?= default
CONFIG ?=
DATASET ?=
MODEL ?= gpt2
GPU ?= h100
SUITE ?= scaling
PHASE ?= phase3
TO :=
FROM :=
WITH :=
NODES ?= 1:1
PORT ?= 29400
STORE ?= 127.0.0.1:$(PORT)
# These are not taken from the environment: WSL, for example, sets NAME to the name of the machine.
RUN :=
NAME :=
INPUT :=
TOKENIZER :=
FIELD :=
N :=
LEVEL ?= 1
ARGS ?=

# A misspelled variable would have no effect.
VARIABLES := PYTHON PY GPUS NNODES NODE_RANK MASTER_ADDR DEVICE TORCH CONFIG DATASET MODEL SUITE PHASE TO FROM WITH NODES PORT STORE
VARIABLES += RUN NAME INPUT TOKENIZER FIELD N LEVEL ARGS $(if $(filter plan,$(MAKECMDGOALS)),GPU)
GIVEN := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
UNKNOWN := $(filter-out $(VARIABLES),$(GIVEN))
$(if $(UNKNOWN),$(error $(UNKNOWN) is no variable of make $(MAKECMDGOALS): use $(filter-out PYTHON PY,$(VARIABLES)), flags in ARGS='--name=value ...', and environment variables before the word make))
$(if $(filter data,$(MAKECMDGOALS)),$(if $(INPUT),,$(if $(NAME)$(TOKENIZER)$(FIELD),$(error NAME, TOKENIZER and FIELD describe a text: add INPUT=FILE))))

PY := .venv/bin/python
LAUNCH = $(PY) -m operate.launch --gpus=$(GPUS) --nnodes=$(NNODES) --node_rank=$(NODE_RANK) --master_addr=$(MASTER_ADDR)
QUOTED = '$(subst ','\'',$(1))'
FLAGS = $(CONFIG) $(if $(DATASET),$(call QUOTED,--dataset=$(DATASET))) $(if $(DEVICE),--device=$(DEVICE)) $(ARGS)
TRAINER = $(or $(filter nanoGPT%,$(PHASE:baseline=nanoGPT)),$(firstword $(wildcard $(PHASE)_*)),$(PHASE))/train.py
COMMA := ,
DATASETS = $(foreach part,$(subst $(COMMA), ,$(DATASET)),$(firstword $(subst :, ,$(part))))
PREPARED := $(patsubst %prepare.py,%meta.json,$(wildcard $(foreach name,shakespeare_char shakespeare synthetic $(DATASETS),nanoGPT/data/$(name)/prepare.py)))

CHECK_DATASET = $(if $(DATASET),test -e $(call QUOTED,nanoGPT/data/$(DATASET)/meta.json) -o -e $(call QUOTED,$(DATASET)/meta.json) || for name in $(patsubst %,"%",$(DATASETS)); do \
	test -e "nanoGPT/data/$$name/meta.json" -o -e "$$name/meta.json" || { \
	echo "error: there is no prepared dataset $$name: choose $(PREPARABLE)$(COMMA) or prepare your own text with make data INPUT=FILE" >&2; exit 2; }; done)
PREPARABLE = $(subst $() ,$(COMMA) ,$(sort $(notdir $(patsubst %/prepare.py,%,$(wildcard nanoGPT/data/*/prepare.py)))))

.PHONY: help setup data doctor notebooks exercise check hint solution diff baseline phase1 phase2 phase3 sample
.PHONY: evaluate copy preflight elastic watch plot autopsy fault gate plan profile matrix suite bench gpu test
.PHONY: exercises test-fast check-ptx lint book

help:  ## list the targets
	@echo "begin here:"
	@echo "  make phase3 GPUS=4    train a GPT with FSDP on four ranks, and print a sample"
	@echo "  make notebooks        read and run the course"
	@echo "  make exercise         list the exercises"
	@echo
	@echo "make TARGET [GPUS=4] [DEVICE=cpu] [CONFIG=config/name.py] [DATASET=name] [ARGS='--key=value ...']"
	@echo "multiple nodes: run the same command on each node, with NNODES=2 NODE_RANK=0 MASTER_ADDR=host"
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z0-9-]+:.*##/ {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp .venv/.core names the directory and the Python that .venv was created for. If either has changed, or if a
# set-up was interrupted, the stamp depends on the missing target stale-venv, and make runs the set-up again.
STALE := $(shell [ ! -e .venv/.unfinished ] && { { IFS= read -r root && IFS= read -r python; } <.venv/.core; } 2>/dev/null \
	&& [ "$$root" -ef . ] && [ "$$python" -ef .venv/bin/python ] || echo stale-venv)
.PHONY: $(STALE)

# The rules for these files write them atomically, so an existing file is complete. By default, make would delete it
# when it is interrupted or when the rule fails later.
.PRECIOUS: .venv/.core .venv/.pytest .venv/.dev .venv/.notebooks .venv/.book nanoGPT/data/%/meta.json

.venv/.core: pyproject.toml constraints.txt $(STALE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is missing or older than Python 3.11: install Python 3.11, and run make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) workshop/set_up.py core --torch=$(TORCH)

.venv/.pytest .venv/.dev .venv/.notebooks .venv/.book: .venv/.core
	@$(PY) workshop/set_up.py $(@F:.%=%) --torch=$(TORCH)

nanoGPT/data/synthetic/meta.json: nanoGPT/prepare/synthetic.py
nanoGPT/data/%/meta.json: nanoGPT/data/%/prepare.py nanoGPT/prepare/text.py | .venv/.core
	@$(PY) $<
	@test -e $@ || { echo "error: $< has written no meta.json, which names the tokenizer and the files: prepare your own text with make data INPUT=FILE" >&2; exit 2; }
	@touch -c $@

# Without a GPU, small versions run in Triton's interpreter.
BENCH_kernels = bench.gpu --to=out/kernels-$(shell date +%s) --only=times $(if $(shell command -v nvidia-smi),,--dry_run)
BENCH_torture := bench.checkpoints.torture

##@ start
setup: .venv/.core  ## create .venv and install the project into it; TORCH=cpu selects the CPU build of PyTorch, TORCH=auto the one for the driver
data: $(if $(INPUT),.venv/.core,$(PREPARED))  ## prepare Shakespeare, synthetic text and DATASET; or INPUT=your text, NAME=, TOKENIZER=
	@$(if $(INPUT),$(PY) -m nanoGPT.prepare.own_text $(call QUOTED,--input=$(INPUT)) $(if $(NAME),$(call QUOTED,--name=$(NAME))) $(if $(TOKENIZER),$(call QUOTED,--tokenizer=$(TOKENIZER))) $(if $(FIELD),$(call QUOTED,--field=$(FIELD))),$(CHECK_DATASET))
doctor:  ## check this machine and the environment; each problem has a remedy; also runs before make setup
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 9))' || { echo "$(PYTHON) is missing or older than Python 3.9: install Python 3.11, and run make doctor PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -m workshop.doctor

##@ learn
notebooks: .venv/.notebooks data  ## install Jupyter and open the notebooks
	@.venv/bin/jupyter lab notebooks $(ARGS)
exercise: .venv/.core  ## write exercise N=zero1.5 into work/, for you to solve; without N, list the exercises
	@$(PY) -m workshop.exercises exercise --name=$(N)
check: .venv/.core data  ## check your answer to exercise N=zero1.5 on real ranks, and explain what is wrong; takes seconds
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m workshop.exercises check --name=$(N)
hint: .venv/.core  ## print a hint for exercise N=zero1.5; LEVEL=1: a nudge, 2: the idea, 3: the line
	@$(PY) -m workshop.exercises hint --name=$(N) --level=$(LEVEL)
solution: .venv/.core  ## print the repository's own code for exercise N=zero1.5
	@$(PY) -m workshop.exercises solution --name=$(N)
diff: .venv/.core  ## show what PHASE=phase3 changes in the baseline's train.py, or compare the functions of FROM=a.py and TO=b.py
	@$(PY) -m $(if $(FROM)$(TO),workshop.steps $(FROM) $(TO),workshop.diff $(or $(firstword $(wildcard $(PHASE)_*)),$(PHASE)))

##@ run
baseline: .venv/.core data  ## train the baseline: one process, or DDP on GPUS ranks
	@$(LAUNCH) nanoGPT/train.py $(FLAGS)
phase1: .venv/.core data  ## train with ZeRO-1: sharded optimizer state
	@$(LAUNCH) phase1_zero1/train.py $(FLAGS)
phase2: .venv/.core data  ## train with Triton kernels
	@$(LAUNCH) phase2_triton/train.py $(FLAGS)
phase3: .venv/.core data  ## train with FSDP: sharded parameters, gradients and optimizer state
	@$(LAUNCH) phase3_fsdp/train.py $(FLAGS)
sample: .venv/.core  ## generate text from RUN=out/...; without RUN, from the newest run
	@$(PY) -m nanoGPT.sample $(if $(RUN),$(call QUOTED,--out_dir=$(RUN))) $(if $(DEVICE),--device=$(DEVICE)) $(ARGS)
evaluate: .venv/.core data  ## solve problems with the model of RUN=out/... on GPUS ranks; without RUN, of the newest run
	@$(PY) -m evaluation --gpus=$(GPUS) $(if $(RUN),$(call QUOTED,--out_dir=$(RUN))) $(if $(DEVICE),--device=$(DEVICE)) $(ARGS)
copy: .venv/.core data  ## copy PHASE=phase3 and what it needs of the core into a directory TO=DIR; WITH=operate,measure: also these observers
	@$(PY) -m workshop.copy_phase --phase=$(PHASE) $(call QUOTED,--to=$(TO)) $(if $(WITH),--packages=$(WITH))

##@ operate
preflight: .venv/.core data  ## check everything that a run of PHASE=phase3 on GPUS ranks needs; under a minute
	@$(PY) -m bench.preflight --gpus=$(GPUS) --nnodes=$(NNODES) --node_rank=$(NODE_RANK) --master_addr=$(MASTER_ADDR) $(TRAINER) $(FLAGS)
elastic: .venv/.core data  ## train PHASE=phase3 as one node of an elastic job with NODES=1:4 nodes, which meet at STORE=host:port
	@$(PY) -m operate.elastic --gpus=$(GPUS) --nodes=$(NODES) --store=$(STORE) $(TRAINER) $(FLAGS)
watch: .venv/.core  ## show RUN=out/... while it trains: loss, ranks, checkpoints; without RUN, the newest run
	@$(PY) -m operate.watch $(if $(RUN),$(call QUOTED,--run=$(RUN)))
plot: .venv/.core  ## draw the metrics of RUN=out/a,out/b in one figure, and print a summary
	@$(PY) -m operate.plot $(if $(RUN),$(call QUOTED,--run=$(RUN)))
autopsy: .venv/.core  ## find out why RUN=out/... failed or is slow, and how to continue; without RUN, the newest run
	@$(PY) -m operate.autopsy $(if $(RUN),$(call QUOTED,--run=$(RUN))) $(ARGS)
fault: .venv/.core data  ## start a run with a planted fault, NAME=hang; without NAME, list the faults
	@$(PY) -m workshop.faults $(if $(NAME),--name=$(NAME))
gate: .venv/.core data  ## train PHASE=phase3 and the baseline, and compare losses, memory and speed
	@$(PY) -m bench.gate --gpus=$(GPUS) $(TRAINER) $(FLAGS)

##@ measure
plan: .venv/.core  ## predict memory and speed of MODEL on GPUS of type GPU, for every phase; needs no GPU
	@$(PY) -m bench.plan --model=$(MODEL) --gpus=$(GPUS) --gpu=$(GPU) $(ARGS)
profile: .venv/.core data  ## profile PHASE=phase3 on GPUS ranks: timeline, overlap, most expensive operators
	@OMP_NUM_THREADS=1 $(PY) -m bench.profile_step --gpus=$(GPUS) $(TRAINER) $(FLAGS)
matrix: .venv/.dev data  ## run every phase on 1, 2, 4 and 8 ranks, and the main options: losses, communication, memory, time
	@OMP_NUM_THREADS=1 $(PY) -m bench.matrix $(ARGS)
	@$(PY) -m bench.tables
suite: .venv/.dev data  ## run SUITE=scaling, memory, wrapping, depth, kernels, optimizers or seeds; resumes after a kill
	@OMP_NUM_THREADS=1 $(PY) -m bench.suite --suite=$(SUITE) $(ARGS)
bench: $(if $(BENCH_$(NAME)),.venv/.dev data)  ## measure NAME=kernels, or torture (kills of saves)
	@test -n "$(BENCH_$(NAME))" || { echo "error: NAME=$(NAME) is not a benchmark: choose kernels or torture" >&2; exit 2; }
	@OMP_NUM_THREADS=1 $(PY) -m $(BENCH_$(NAME)) $(ARGS)
gpu: .venv/.dev data  ## measure everything that needs a GPU, into TO=DIR; repeat it until nothing is left
	@$(PY) -m bench.gpu $(call QUOTED,--to=$(or $(TO),out/gpu)) $(ARGS)

##@ develop
test: .venv/.dev data  ## run the tests (DEVICE=cuda: those that use a GPU)
	@$(PY) -m pytest $(if $(DEVICE),--device=$(DEVICE)) $(if $(filter cuda,$(DEVICE)),-m "gpu and not slow") $(ARGS)
test-fast: .venv/.dev data  ## run only the fast tests, which start no processes; under a minute
	@$(PY) -m pytest -m "not slow and not heavy" --fast $(ARGS)
exercises: .venv/.core data  ## test all exercises: solutions pass, stubs fail, wrong answers are explained; N=zero1: a chapter
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) -m workshop.exercises prove --name=$(N)
check-ptx: .venv/.pytest  ## compile all kernels, and torch.compile's code, for GPUs; needs no GPU
	@$(PY) -m pytest tests/phase2/test_machine_code.py -m "slow or not slow" $(ARGS)
lint: .venv/.dev  ## run ruff and mypy
	@$(PY) -m ruff check . && $(PY) -m ruff format --check --exclude notebooks . && $(PY) -m mypy
book: .venv/.book  ## build the site from the documents and notebooks: out/book/index.html
	@$(PY) -m workshop.site $(ARGS)
