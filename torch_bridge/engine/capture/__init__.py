"""Whole-step capture: run a step once, bind its inputs and outputs, replay its program.

`step` and `step_recording` run it, `guards` and `tensor_guards` check what it has read, `assemble`
and `bindings` bind inputs and results, `replay` runs the compiled program.
"""

if __name__ != "isoshard.torch_bridge.engine.capture":
    raise ImportError(
        f"import isoshard.torch_bridge.engine.capture, not {__name__}: pip install -e . first"
    )
