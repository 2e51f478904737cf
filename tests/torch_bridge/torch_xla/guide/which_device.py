"""Which device holds what: tensors of other ranks than the mesh, and the rule of the guide."""

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
chips = xr.global_runtime_device_count()
rows, columns = chips // 2, 2
mesh = xs.Mesh(np.arange(chips), (rows, columns), ("data", "model"))
assert [chip["name"] for chip in xr.global_runtime_device_attributes()] == [
    f"CPU:{number}" for number in range(chips)
]


def pieces(whole, spec):
    marked = xs.mark_sharding(whole.to(torch_xla.device()), mesh, spec)
    torch_xla.sync()
    assert torch.equal(marked.cpu(), whole)
    return [piece.data for piece in marked.local_shards]


table = torch.arange(64.0).reshape(8, 8)
high, wide = 8 // rows, 8 // columns
for number, piece in enumerate(pieces(table, ("data", "model"))):
    row, column = divmod(number, columns)
    there = table[row * high : (row + 1) * high, column * wide : (column + 1) * wide]
    assert torch.equal(piece, there)

cube, line = torch.randn(8, 8, 16), torch.arange(8.0)
assert {piece.shape for piece in pieces(cube, (None, "data", "model"))} == {(8, 2, 8)}
assert [piece.tolist() for piece in pieces(line, ("data",))] == [
    [2.0 * row, 2.0 * row + 1] for row in range(rows) for _ in range(columns)
]
assert [piece.item() for piece in pieces(line, (("data", "model"),))] == list(range(8))
