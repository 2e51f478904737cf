"""Benchmarks: the same training step and the same exchange, with isoshard and without.

Each module is a command: `python -m benchmarks.training` and `python -m benchmarks.exchange` print
a table and write their numbers, with machine, versions and date, to `benchmarks/results/`.
"""
