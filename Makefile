# Two commands matter: `make up` (the whole cluster, one answer) and `make test`.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
PEERS  ?=
PYTEST_ARGS ?=

.PHONY: help up test soak faults lint proto install peers clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# torch first and pinned: any other order pulls several gigabytes of CUDA packages onto a CPU machine.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvrelay needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing pinned dependencies into $(VENV) (some minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@$(BIN)/python -m kvrelay_kernels.native.build || echo "No native CPU kernels: torch does the work, at a third of the speed"
	@touch $@

install: $(VENV)/.installed ## create .venv with everything in it

up: install ## start the cluster and stream one answer; ONCE="PROMPT" answers it and exits
	@$(BIN)/kvrelay up $(if $(ONCE),--once "$$ONCE") $(ARGS)

test: install lint ## lint, then the whole suite
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

soak: install ## ten thousand clients that leave at random moments; nothing of them may be left
	@SOAK_ABORTS=$(or $(ABORTS),10000) $(BIN)/python -m pytest -q --show-capture=no tests/stories/test_leaving_early.py

faults: install ## seven moments of a request × what can happen to it: print the table, fail on a red cell
	@$(BIN)/python -m tests.stories.fault_matrix

lint: install ## ruff, mypy strict, import-linter
	@$(BIN)/ruff check services kernels loadtest tests
	@$(BIN)/mypy
	@$(BIN)/lint-imports

proto: install ## regenerate services/kvrelay/pb from proto/
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=services --pyi_out=services --grpc_python_out=services proto/kvrelay/pb/*.proto

peers: install ## build an environment for each engine that `kvrelay bench peers` compares with
	@$(BIN)/python -m kvrelay_loadtest.peers.install $(PEERS)

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
