"""A differential fuzzer: random PyTorch programs, on the CPU and on the `jax` device.

    python -m tests.fuzz                             # 20,000 programs, the same on every machine
    python -m tests.fuzz --seed 7 --programs 2000
    python -m tests.fuzz --seed new --minutes 2      # its first line tells how to repeat it
    python -m tests.fuzz --optimized                 # XLA optimises as for users; slower
    python -m tests.fuzz --layouts                   # any mesh, devices in any order, uneven sizes

Every tensor that a program leaves alive has to agree: values, dtype, shape, stride, gradient. What
the CPU refuses the `jax` device has to refuse, with the same exception; memory has to be as it was.
Every third task lays the tensors out on a mesh of 8 virtual devices. A program that differs is made
as small as possible by hypothesis, printed as Python that can be pasted and run, and saved in
`out/fuzz`.

Integers and bools are equal. Floats agree to 1e-5 of the largest number of their tensor and 1e-4 of
each (bfloat16: 2e-2; gradients: thirty times that); where they do not, the program runs eight times
more on the CPU with its floats disturbed in their last bits, and what moves there by as much is
rounding. So do the signs of NaN and of zeros that torch's own kernels disagree about, and
subnormal numbers, which XLA computes as 0.

How a program comes about is in `builder`, what it may say in `vocabulary` and `operations`, what
counts as a difference in `compare` and `noise`, what is known and left out in `refused`.

`python -m tests.fuzz.onnx_files` is another fuzzer: hostile ONNX files, which have to be read or
refused.
"""
