"""The tests.

`tests.fuzz`, `tests.conformance`, `tests.batch_split` and `tests.ecosystem` are commands, too.
"""
