"""The command `isoshard run-torch-xla`."""

if __name__ != "isoshard.torch_xla_bridge.cli":
    raise ImportError(
        f"import isoshard.torch_xla_bridge.cli, not {__name__}: pip install -e . first"
    )
