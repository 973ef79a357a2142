PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup demo test check format bench docs clean

setup: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python -e ".[dev,train,eval,export,web]"
	touch $@

demo: setup
	$(BIN)/torchbcos explain examples/photos/church.jpg --top 3 --delta --out out/demo

test: check
	$(BIN)/pytest -n auto -q

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: setup
	$(BIN)/torchbcos bench --device $$($(BIN)/python -c "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')") --out out/speed.json

docs: setup
	$(BIN)/python benchmarks/architectures.py
	$(BIN)/python docs/make_pictures.py
	$(BIN)/python docs/make_speed.py
	$(BIN)/torchbcos reproduce cifar10 --page
	$(BIN)/torchbcos reproduce imagenette --page
	$(BIN)/pytest -q README.md docs

clean:
	rm -rf .venv build dist out .mypy_cache .pytest_cache .ruff_cache .hypothesis
