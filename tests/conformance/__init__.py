"""Conformance: torch's own databases on the `jax` device, against CPU torch.

`python -m tests.conformance` runs every entry of `torch.testing`'s `op_db` that takes float32, and
of its databases of modules, optimizers and custom operators. It compares values, gradients,
in-place and `out=` variants, sharded operands, errors and more with CPU torch, and judges the
outcome by the thresholds of `report` and the strict list of expected failures in `expected`. With
`--write` it writes `docs/conformance.md` and `tests/conformance/results.json`.
"""
