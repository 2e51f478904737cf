"""What domain operators send, from 2 to 512 devices: programs, formulas on paper, and the figure.

`python -m benchmarks.domain_scaling` compiles them, counts, and compares.
"""
