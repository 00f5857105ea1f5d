# What anybody types, and all that .github/workflows runs. Each target sets up its environment first, which takes a
# moment only once.
PYTHON ?= python3
BIN := .venv/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
CONSTRAINTS := constraints.txt
# Tests start many processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# TORCH=2.10.0 or TORCH=newest takes the place of the tested torch. Each torchvision pins its torch, so pip finds it.
ifdef TORCH
CONSTRAINTS := build/torch-$(TORCH).txt
$(CONSTRAINTS): constraints.txt
	mkdir -p build
	sed -e 's/^torch==.*/torch==$(TORCH:newest=2.*)/' -e '/^torchvision==/d' constraints.txt > $@
endif

.PHONY: demo test check minimum docs dist lock translations
demo: .venv/ready
	$(BIN)/vitascope train

# Lines are counted where Python has sys.monitoring; tests/coverage_summary.py prints their shares.
test: .venv/tests-ready
	$(BIN)/python -m pytest $$($(BIN)/python -c 'import sys; print("--cov --cov-report=" * (sys.version_info >= (3, 12)))') \
		--numprocesses auto --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 0.5

check: .venv/tests-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The core without any extra, at the oldest versions that pyproject.toml allows, in an environment of its own.
OLDEST := build/oldest
minimum:
	test -d $(OLDEST) || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet "pip>=25.1"
	$(OLDEST)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], \
		sep="\n")' | sed -e 's/>=/==/' $(if $(TORCH),-e 's/^torch==.*/torch==$(TORCH)/') > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt --group core --editable .
	$(OLDEST)/bin/python -m pytest --numprocesses auto --dist loadfile tests/models tests/data \
		tests/training/linear tests/training/tasks tests/training/test_train.py tests/analysis/explain tests/test_public_api.py

# The site, in site/: open site/index.html.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The sdist and the wheel, in dist/.
dist:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt "hatchling>=1.26"
	$(BIN)/python -m hatchling build

# The compiled catalog of the Chinese texts, and the explorer's part of it, after a change of zh.po.
translations: .venv/tests-ready
	cd src/vitascope && $(CURDIR)/$(BIN)/python -c 'import json; from babel.messages.mofile import write_mo; \
		from babel.messages.pofile import read_po; texts = read_po(open("translations/zh.po", "rb"), "zh"); \
		write_mo(open("translations/zh.mo", "wb"), texts); explorer = [text for text in texts if text.context == "explorer"]; \
		json.dump({text.id: text.string for text in explorer}, open("deploy/server/web/chinese.json", "w"), \
		ensure_ascii=False, indent=1)'

# requirements.lock: what `pip` chooses here for the package and all its extras, with the hash of each file.
lock: .venv/tests-ready
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report .venv/lock.json \
		--constraint constraints.txt ".[server,tensorboard,onnx,openvino,parquet,heif,text,page,ray,s3,http]"
	$(BIN)/python -c 'import json; found = json.load(open(".venv/lock.json"))["install"]; print("\n".join(sorted( \
		"{name}=={version} --hash=sha256:".format(**one["metadata"]) + one["download_info"]["archive_info"]["hashes"]["sha256"] \
		for one in found if one["metadata"]["name"] != "vitascope")))' > requirements.lock

.venv/ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable .
	touch $@

.venv/docs-ready: .venv/ready
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group docs
	touch $@

# The peers (timm, transformers, torchvision) are what tests/peers compares with.
.venv/tests-ready: .venv/ready lessons/pyproject.toml
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --group dev --editable ".[server,tensorboard,peers,onnx,openvino,parquet,heif,text,page,ray,s3,http]" --editable ./lessons
	touch $@
