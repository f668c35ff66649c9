.PHONY: check test format

# Under a minute: format, lint, types, import direction, and the fast tests.
check:
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	python -m pytest -m "not slow" -n 2

# Everything that this machine can run.
test:
	python -m pytest

format:
	ruff format .
	ruff check --fix .
