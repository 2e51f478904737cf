"""`XLAShardedTensor`, and the addresses of its memory."""

if __name__ != "isoshard.torch_bridge.tensors":
    raise ImportError(
        f"import isoshard.torch_bridge.tensors, not {__name__}: pip install -e . first"
    )
