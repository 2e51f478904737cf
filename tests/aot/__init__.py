"""Programs compiled for machines that are not here: `python -m tests.aot`, `make aot`."""
