"""The tests; `tests.fuzz`, `tests.conformance` and `tests.ecosystem` are commands, too."""
