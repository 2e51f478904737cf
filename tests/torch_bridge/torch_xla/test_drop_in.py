"""`drop_in.install`: what it changes, and that nothing else changes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_every_way_to_name_the_device():
    command = [sys.executable, "-m", "isoshard", "run-torch-xla", str(HERE / "device_strings.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "every string is understood\n", done.stdout + done.stderr


def test_importing_isoshard_installs_nothing():
    done = python(
        "import sys, isoshard, isoshard.torch_bridge as xs, torch\n"
        "import isoshard.torch_bridge.drop_in\n"
        "import isoshard.torch_bridge.torch_xla\n"
        "assert torch.ones(1, device='jax').device.type == 'jax'\n"
        "assert 'torch_xla' not in sys.modules\n"
        "try:\n    torch.ones(1).to('xla')\n"
        "except RuntimeError as error:\n    assert 'xla' in str(error)\n"
        "else:\n    raise AssertionError('xla is understood')\n"
        "try:\n    import torch_xla\n"
        "except ModuleNotFoundError:\n    print('as before')\n"
    )
    assert done.stdout == "as before\n", done.stderr


def test_it_refuses_to_take_the_place_of_a_loaded_torch_xla(tmp_path):
    (tmp_path / "torch_xla.py").touch()
    done = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import torch_xla\n"
        "import isoshard.torch_bridge.drop_in as drop_in\n"
        "try:\n    drop_in.install()\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    assert done.stdout.startswith("the real torch_xla is loaded already, from "), done.stderr
    assert "torch_xla_backend" in done.stdout


def test_it_takes_precedence_over_one_that_is_only_installed(tmp_path):
    (tmp_path / "torch_xla.py").touch()
    done = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import isoshard.torch_bridge.drop_in as drop_in\n"
        "drop_in.install(); drop_in.install()\n"
        "import torch_xla\nprint(torch_xla.__name__)\n"
    )
    assert done.stdout == "isoshard.torch_bridge.torch_xla\n", done.stderr


def test_a_wrong_number_of_devices_is_refused():
    done = python(
        "import os; os.environ['CPU_NUM_DEVICES'] = 'many'\n"
        "import isoshard.torch_bridge.drop_in as drop_in\n"
        "try:\n    drop_in.install()\n"
        "except ValueError as error:\n    print(error)\n"
    )
    assert done.stdout == "CPU_NUM_DEVICES is a positive number of devices, and it is 'many'\n"


def test_what_a_script_marks_it_reads_back():
    done = as_script("spmd_reads.py")
    assert done.stdout == "all is read as it was written\n", done.stdout + done.stderr


def as_script(name: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A script of torch_xla on 8 virtual devices."""
    command = [sys.executable, "-m", "isoshard", "run-torch-xla", str(HERE / name)]
    variables = {**os.environ, "CPU_NUM_DEVICES": "8", "PJRT_DEVICE": "CPU", **more}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=variables
    )


def test_what_only_torch_xla_allows(tmp_path):
    saved = {"XLA_SAVE_TENSORS_FILE": str(tmp_path / "graphs"), "XLA_SAVE_TENSORS_FMT": "hlo"}
    done = as_script("spmd_words.py", **saved)
    assert done.stdout == "all is as torch_xla has it\n", done.stdout + done.stderr


def test_programs_are_saved_as_they_were_recorded(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch_xla\nx = torch.ones(2, device='xla') + 1\ntorch_xla.sync()\n"
    )
    done = as_script(str(script), XLA_SAVE_TENSORS_FILE=str(tmp_path / "graphs"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "graphs.0").read_text().splitlines()
    assert "aten::add.Tensor" in " ".join(lines) and lines[-2] == "## END_GRAPH"
    assert "script.py:3" in lines[1]


def test_an_unknown_format_of_programs_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch_xla\n")
    saved = {"XLA_SAVE_TENSORS_FILE": str(tmp_path / "graphs"), "XLA_SAVE_TENSORS_FMT": "dot"}
    done = as_script(str(script), **saved)
    assert "XLA_SAVE_TENSORS_FMT is 'dot', and isoshard writes text and hlo" in done.stderr
