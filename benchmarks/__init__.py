"""Benchmarks: the same training step, recording and exchange, with isoshard and without.

Each of `python -m benchmarks.training`, `.recording` and `.exchange` prints a table and writes its
numbers, with machine, versions and date, to `benchmarks/results/`. What is measured and how:
docs/benchmarks.md. Timing, tables, results and processes are those of `tools/harness/`.
"""
