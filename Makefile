.PHONY: check test format

# Under a minute: format, lint, types, import direction, and the fast tests. Shapes are checked at run time.
SHAPES = --jaxtyping-packages=quintain.objectives,quintain.advantages,quintain.kl,quintain.masking,beartype.beartype

check:
	ruff format --check .
	ruff check .
	mypy
	lint-imports
	python -m pytest -m "not slow" $(SHAPES)

# Everything that this machine can run.
test:
	python -m pytest $(SHAPES)

format:
	ruff format .
	ruff check --fix .
