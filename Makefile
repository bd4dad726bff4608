SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install demo style check test test-slow bench-decode bench-endpoint bench-joint bench-firp soak clean

# Any build of torch will do, e.g. make install TORCH='torch==2.13.0+cpu'
TORCH ?= torch==2.13.0
PYTHON ?= python3

BIN := .venv/bin
JOINT := recipes/smollm2-135m-medusa2
READY := .venv/.installed

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --quiet "$(TORCH)"
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[dev]'
	@touch $@

install: $(READY) ## make .venv with torch, the package and the developer's tools

demo: $(READY) ## decode MT-Bench questions plain and with drafts, side by side
	$(BIN)/medusa demo

style: $(READY) ## ruff: lint and format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: style ## style and mypy
	$(BIN)/mypy

test: $(READY) ## the tests, offline once the model and the data are fetched
	$(BIN)/medusa assets
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m 'not slow'

test-slow: $(READY) ## the tests that take minutes
	$(BIN)/medusa assets
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m slow

bench-decode: $(READY) ## time steps by rows and engine, then decoding end to end
	$(BIN)/medusa bench --steps
	$(BIN)/medusa bench --mt-bench --limit 16 --max-new-tokens 128 \
		--methods hf,hf-lookup,ar,medusa,medusa-dynamic$$($(BIN)/python -c 'import llama_cpp' 2>/dev/null && echo ,llama.cpp)

# Fewer for a look: make soak REQUESTS=500
REQUESTS ?= 10000

soak: $(READY) ## 10,000 small requests to a server by 32 clients, a tenth cancelled, a tenth malformed
	$(BIN)/python -m tests.soak --requests $(REQUESTS)

bench-endpoint: $(READY) ## distilling through a server against asking it and nothing else, 8 at a time
	$(BIN)/python -m medusa_cli.commands.endpoint_load $(if $(ENDPOINT),--endpoint $(ENDPOINT))

# A run with distilled conversations, and in its folder medusa/ the heads that stage 2 starts from.
RUN ?= runs/smollm2

bench-joint: $(READY) ## train heads and model together by the recipes and "directly": what it gains, what it costs
	test -d $(RUN)/medusa/drafter || $(BIN)/medusa train recipes/smollm2-135m-medusa1.yaml --run $(RUN)/medusa
	$(BIN)/medusa train $(JOINT).yaml --run $(RUN)/medusa2 --from $(RUN)/medusa
	$(BIN)/medusa train $(JOINT).yaml --run $(RUN)/longer --from $(RUN)/medusa2 train.schedule=constant \
		train.max_tokens=350000 train.seed=2
	$(BIN)/medusa train $(JOINT)-settle.yaml --run $(RUN)/settling --from $(RUN)/longer train.lambda_0=0.12 \
		train.max_tokens=150000 train.backbone_lr=7e-4 train.seed=3
	$(BIN)/medusa train $(JOINT)-settle.yaml --run $(RUN)/settled --from $(RUN)/settling
	$(BIN)/medusa train $(JOINT)-heads.yaml --run $(RUN)/joint --from $(RUN)/settled
	$(BIN)/medusa train recipes/smollm2-135m-direct.yaml --run $(RUN)/direct
	$(BIN)/medusa calibrate --run $(RUN)/medusa
	$(BIN)/medusa tree --run $(RUN)/medusa --budget 64 --output $(RUN)/joint.json
	for name in medusa medusa2 longer settled joint direct; do $(BIN)/medusa bench --mt-bench --limit 8 \
		--max-new-tokens 128 --methods ar,medusa --run $(RUN)/$$name --tree $(RUN)/joint.json || exit 1; done
	$(BIN)/medusa compare $(foreach name,medusa medusa2 longer settled joint direct,$(RUN)/$(name))

bench-firp: $(READY) ## FIRP's entry layers and its mask, as the paper's Figures 5 to 7, on the default run's data
	$(BIN)/medusa bench-firp

clean: ## remove .venv and the tools' caches
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache build *.egg-info
