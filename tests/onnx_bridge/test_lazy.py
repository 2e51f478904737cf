"""What naming `iso.onnx` loads, and what it says where onnx is missing."""

import subprocess
import sys

from isoshard.core.installation import install_command

PROGRAM = """
import sys
import isoshard as iso
names = ("onnx", "torch", "flax", "onnxruntime")
loaded = lambda: [name for name in names if sys.modules.get(name)]
sys.modules["onnx"] = None
try:
    iso.onnx.annotate
except ImportError as error:
    print(error, loaded())
del sys.modules["onnx"]
import onnx
assert "isoshard.onnx_bridge" not in sys.modules
try:
    iso.sharding_of(onnx.ModelProto())
except ValueError as error:
    print(error)
iso.onnx.annotate
print(loaded())
"""


def test_what_is_loaded():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    missing, unannotated, loaded = done.stdout.splitlines()
    how = install_command("onnx")
    assert missing == f"onnx is not installed; get it with {how} []", done.stderr
    assert "the model has no device configuration" in unannotated  # a model loads the bridge
    assert loaded == "['onnx']" and not done.stderr
