"""A differential fuzzer: random PyTorch programs, on the CPU and on the `jax` device.

`python -m tests.fuzz` (or `make fuzz`) writes 20,000 random programs and runs each on both devices.
Every tensor that a program leaves alive has to agree: values, dtype, shape, stride, gradient. What
the CPU refuses the `jax` device has to refuse. A program that differs is made as small as possible
by hypothesis and printed as Python that can be pasted and run.

How a program comes about is in `builder`, what it may say in `vocabulary` and `operations`, what
counts as a difference in `compare` and `noise`, what is known and documented in `refused`.

`python -m tests.fuzz.onnx_files` is another fuzzer: hostile ONNX files, which have to be read or
refused.
"""
