# The three things anybody types. Each sets up .venv first, which takes a moment only once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check
demo: .venv/ready
	$(BIN)/vitascope train

test: .venv/tests-ready
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

check: .venv/tests-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# The peers (timm, transformers, torchvision) are what tests/peers compares with.
.venv/tests-ready: .venv/ready
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable ".[server,tensorboard,peers,onnx,openvino,parquet,heif]"
	touch $@
