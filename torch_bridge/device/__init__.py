"""The `jax` device as torch sees it: registration, accelerator API, generators, memory."""

if __name__ != "isoshard.torch_bridge.device":
    raise ImportError(
        f"import isoshard.torch_bridge.device, not {__name__}: pip install -e . first"
    )
