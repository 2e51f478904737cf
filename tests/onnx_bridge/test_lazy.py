"""What naming `iso.onnx` loads, and what it says where onnx is missing."""

import subprocess
import sys

from isoshard.core.installation import install_command

PROGRAM = """
import sys
{before}
import isoshard as iso
try:
    iso.onnx.annotate
except ImportError as error:
    print(error)
print([name for name in ("onnx", "torch", "flax", "onnxruntime") if sys.modules.get(name)])
"""


def run(before=""):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.stderr
    return done.stdout.splitlines()


def test_torch_is_not_loaded():
    assert run() == ["['onnx']"]


def test_without_onnx_the_error_says_how_to_get_it():
    told, loaded = run("sys.modules['onnx'] = None")
    assert told == f"onnx is not installed here; get it with {install_command('onnx')}"
    assert loaded == "[]"


def test_a_model_loads_the_bridge():
    program = (
        "import isoshard as iso, onnx, sys\n"
        "assert 'isoshard.onnx_bridge' not in sys.modules\n"
        "try:\n    iso.sharding_of(onnx.ModelProto())\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert "the model has no device configuration" in done.stdout, done.stderr
