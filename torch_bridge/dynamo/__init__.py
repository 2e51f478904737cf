"""`torch.compile(model, backend="isoshard")`."""

if __name__ != "isoshard.torch_bridge.dynamo":
    raise ImportError(
        f"import isoshard.torch_bridge.dynamo, not {__name__}: pip install -e . first"
    )

from .dynamo import backend

__all__ = ["backend"]
