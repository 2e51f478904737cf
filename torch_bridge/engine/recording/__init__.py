"""Recording: tensors without elements, the tape, and who records now."""

if __name__ != "isoshard.torch_bridge.engine.recording":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.recording, not {__name__}: pip install -e . first"
    )
