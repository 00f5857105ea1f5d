# The three things anybody types. Each sets up .venv first, which takes a moment only once.
PYTHON ?= python3
BIN := .venv/bin
# Tests start many processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check docs lock translations
demo: .venv/ready
	$(BIN)/vitascope train

test: .venv/tests-ready
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --durations 30 --durations-min 0.5

check: .venv/tests-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in site/: open site/index.html.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

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

.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/docs-ready: .venv/ready
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

# The peers (timm, transformers, torchvision) are what tests/peers compares with.
.venv/tests-ready: .venv/ready lessons/pyproject.toml
	$(BIN)/python -m pip install --quiet "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable ".[server,tensorboard,peers,onnx,openvino,parquet,heif,text,page,ray,s3,http]" --editable ./lessons
	touch $@
