# Short names for what contributors run. `just` alone lists them; each line also works by itself.
python := env("PYTHON", ".venv/bin/python")

# list the recipes
default:
    @just --list

# make .venv with everything that the tests need
setup:
    python3 -m venv .venv
    .venv/bin/pip install -q -e '.[dev]'

# unit tests: offline, some processes more than cores
test *paths="tests":
    {{python}} -m pytest -q -n auto --dist loadfile --no-loadscope-reorder {{paths}}

# tests with servers, kills and mounts; docs/how-to/integration-tests.md
integration *options:
    {{python}} -m pip install -q -r integration/requirements.txt
    {{python}} -m pytest integration --ignore=integration/bench -n 2 --dist loadfile {{options}}

# the wheel, into dist/; without a C compiler it has no compiled loops, and its tag is py3-none-any
wheel:
    {{python}} -m pip wheel -q --no-deps -w dist .

# ruff and mypy
lint:
    {{python}} -m ruff check .
    {{python}} -m ruff format --check .
    {{python}} -m mypy

# links, prose, pictures and generated parts of the documents
prose:
    {{python}} docs/pictures/draw.py
    {{python}} docs/pictures/plots.py
    {{python}} docs/reference/interface.py
    {{python}} docs/reference/generate.py
    {{python}} -m pytest -q tests/test_docs.py tests/test_prose.py

# the site, into build/site; needs pip install -e '.[docs]'
docs:
    {{python}} -m mkdocs build -f .mkdocs.yml --strict

# one benchmark, for example: just bench dcp --bytes 256MiB --rounds 3
bench name *options:
    {{python}} integration/bench/{{name}}.py {{options}}

# train, kill, resume
demo:
    {{python}} -m tierfs.cli demo

# everything that must pass before a change lands, in a fresh clone
ci:
    .ci/run
