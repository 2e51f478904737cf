"""torch.distributed's names for tensors on the `jax` device: one process drives the mesh."""

if __name__ != "isoshard.torch_bridge.distributed":
    raise ImportError(f"import isoshard.torch_bridge.distributed, not {__name__}")

from .device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
