"""The collectives of a compiled program by kind and mesh axes: how many, and their bytes."""

from benchmarks.counted_collectives import counted


def collectives(text, mesh):
    """Of the HLO of a program: (kind, axes) -> (count, bytes) of one run; loops are counted in.

    Bytes are of a collective's result, of a reduce-scatter of its operand.
    """
    found = {}
    for name, one in counted(text, dict(mesh.shape)).items():
        kind, axes = name.split()
        found[kind, tuple(axes.split("+"))] = (one.operations, one.bytes)
    return found
