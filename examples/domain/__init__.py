"""Domain and data parallelism: two networks learn fields that are too large for one device.

`python -m examples.domain` trains a U-Net and a transformer, in JAX and in torch, on (2, 4) virtual
devices, and compares with one device and with the solver. What it shows: docs/domain_example.md.
"""
