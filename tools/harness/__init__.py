"""What the fuzzer, the conformance run and the benchmarks share.

- `command`: the command line of a benchmark, which prints tables and keeps results.
- `results`: JSON files, with all that is needed to repeat what they hold.
- `tables`: rows of figures, on the terminal and in Markdown.
- `documents`: tables of the docs, replaced by those of results.
- `timing`: contestants in turns, their medians, and the memory of a process.
- `workers`: processes that do one task after another, and may crash or hang without harm.
- `calls`: one function, called in new processes: of another Python, with other variables, as ranks.
"""
