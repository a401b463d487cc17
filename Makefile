# make demo    install, then train a tiny model from scratch with SFT and improve it with GRPO: a few minutes on two cores
# make check   install, then ruff and the tests of formulas, batching and data: under a minute on two cores
# make test    install, then the whole test suite: tests/README.md says what to run after which change
# make faults  install, then kill runs at 50 random times and break their checkpoints: 12 minutes on two cores
# make lint    install, then ruff

PYTHON ?= python3
BIN := .venv/bin
CPU_TORCH := torch==2.13.0+cpu

.PHONY: install demo check test faults lint clean

install: .venv/installed

.venv/installed: requirements.txt requirements-cpu.txt requirements-cpu-overrides.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade uv
	if nvidia-smi > /dev/null 2>&1; then \
		$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements.txt; \
	else \
		{ $(BIN)/python -m pip install --quiet $(CPU_TORCH) 2> /dev/null || \
		  $(BIN)/python -m pip install --quiet $(CPU_TORCH) --extra-index-url https://download.pytorch.org/whl/cpu; } && \
		$(BIN)/uv pip install --quiet --python $(BIN)/python -r requirements-cpu.txt --override requirements-cpu-overrides.txt; \
	fi
	touch $@

demo: install
	$(BIN)/python benchmarks/demo.py

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests/formulas tests/data

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

faults: install
	GLASSRL_RANDOM_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/faults

lint: install
	$(BIN)/ruff check .

clean:
	rm -rf .venv runs
