"""The command `isoshard onnx`."""

if __name__ != "isoshard.onnx_bridge.cli":
    raise ImportError(f"import isoshard.onnx_bridge.cli, not {__name__}: pip install -e . first")
