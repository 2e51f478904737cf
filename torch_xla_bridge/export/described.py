"""What is behind a tensor, as text: its recorded operations, or its buffers.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("x",))
>>> x = xs.mark_sharding(torch.ones(8, device="jax"), mesh, ("x",))
>>> xs.sync()
>>> print(debug_info(x))
XLATensor {
  Device: SPMD:0
  IR: xla::device_data
  XLAShardedData {
    Data Device: SPMD:0
    Data Shape: f32[8]
    OpSharding: {devices=[8]0,1,2,3,4,5,6,7}
    NumShards: 8
  }
  Tensor on host: None
}
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from isoshard.torch_bridge.kit import XLAShardedTensor, marks

from . import lowered


def debug_info(tensor: torch.Tensor) -> str:
    """What is behind a tensor, in torch_xla's words. Nothing is executed.

    Returns:
        The operations that are still to be executed, the shape and the layout of its buffers, or
        the size of what the host holds until a program needs it.
    """
    if not isinstance(tensor, XLAShardedTensor):
        raise RuntimeError(
            f"a tensor on {tensor.device} has no recorded operations and no buffers; move it "
            "with .to(torch_xla.device())"
        )
    lines = ["Device: SPMD:0"]
    host = "None"
    if marks.is_on_host(tensor):
        host = f"with size {list(tensor.shape)}"
        lines += ["IR: None", "XLAData: None"]
    elif marks.is_recorded(tensor):
        text = lowered.tape_text([tensor]).splitlines()
        lines += [f"IR: {text[0]}", *text[1:], "XLAData: None"]
    else:
        lines += ["IR: xla::device_data", *_data(tensor)]
    lines.append(f"Tensor on host: {host}")
    return "\n".join(["XLATensor {", *(f"  {line}" for line in lines), "}"])


def graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """A number that is equal for equal programs: operations, shapes and layouts."""
    return hashlib.sha256(lowered.stablehlo(tensors).encode()).digest()


def _data(tensor: XLAShardedTensor) -> list[str]:
    layout = marks.requested_sharding(tensor)
    entries = [
        "Data Device: SPMD:0",
        f"Data Shape: {lowered.short(tensor._aval.physical, tensor.shape)}",
    ]
    if layout is None:
        return ["XLAData {", *(f"  {line}" for line in entries), "}"]
    entries += [
        f"OpSharding: {marks.spec_string(layout, tensor.dim())}",
        f"NumShards: {layout.mesh.size}",
    ]
    return ["XLAShardedData {", *(f"  {line}" for line in entries), "}"]
