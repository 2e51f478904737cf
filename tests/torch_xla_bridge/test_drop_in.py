"""`drop_in.install`: what it changes, and what a process keeps; scripts of torch_xla."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_a_loaded_torch_xla_keeps_its_place_and_one_only_installed_does_not(tmp_path, processes):
    (tmp_path / "torch_xla.py").touch()
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    start += "import isoshard.torch_xla_bridge.drop_in as drop_in\n"
    done = processes.run(
        "-c",
        start + "import torch_xla\n"
        "try:\n    drop_in.install()\n"
        "except RuntimeError as error:\n    print(error)\n",
    )
    assert done.stdout.startswith("the real torch_xla is loaded already, from "), done.stderr
    assert "torch_xla_backend" in done.stdout
    done = processes.run(
        "-c",
        start + "drop_in.install(); drop_in.install()\nimport torch_xla\nprint(torch_xla.__name__)",
    )
    assert done.stdout == "isoshard.torch_xla_bridge.torch_xla\n", done.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"CPU_NUM_DEVICES": "many"},
            "CPU_NUM_DEVICES is a positive number of devices, and it is 'many'",
        ),
        (
            {"XLA_SAVE_TENSORS_FILE": "graphs", "XLA_SAVE_TENSORS_FMT": "dot"},
            "XLA_SAVE_TENSORS_FMT is 'dot', and isoshard writes text and hlo",
        ),
    ],
)
def test_wrong_variables_are_refused(environment, message, processes):
    install = "from isoshard.torch_bridge import drop_in\ndrop_in.install()"
    assert message in processes.run("-c", install, **environment).stderr


def test_every_way_to_name_the_device(processes):
    done = processes.script(HERE / "device_strings.py", CPU_NUM_DEVICES="1")
    line, last, _ = done.stdout.split("\n")
    assert last == "every string is understood", done.stdout + done.stderr
    assert line.startswith("| Training Device=xla:0/0 Step=3 Loss=0.5")


def test_what_only_torch_xla_allows(tmp_path, processes):
    saved = {"XLA_SAVE_TENSORS_FILE": str(tmp_path / "graphs"), "XLA_SAVE_TENSORS_FMT": "hlo"}
    done = processes.script(HERE / "spmd_words.py", **saved)
    assert done.stdout == "all is as torch_xla has it\n", done.stdout + done.stderr


def test_programs_are_saved_as_they_were_recorded(tmp_path, processes):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch_xla\nx = torch.ones(2, device='xla') + 1\ntorch_xla.sync()\n"
    )
    done = processes.script(script, XLA_SAVE_TENSORS_FILE=str(tmp_path / "graphs"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "graphs.0").read_text().splitlines()
    assert "aten::add.Tensor" in " ".join(lines) and lines[-2] == "## END_GRAPH"
    assert "script.py:3" in lines[1]


QUEUED = """
import time, torch, isoshard.torch_bridge as xs
from isoshard.torch_xla_bridge.torch_xla.core import xla_model as xm
xm.add_step_closure(lambda: (time.sleep(0.5), print("ran")), run_async=True)
xm.add_step_closure(lambda: 1 // 0, run_async=True)
xs.sync()
print("end of the script")
"""


def test_closures_that_are_queued_run_before_the_process_ends(processes):
    done = processes.run("-c", QUEUED, shutdown=True)
    assert done.stdout.split("\n")[:2] == ["end of the script", "ran"]
    assert "a step closure that ran in the background failed:" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_process_ends_with_iterators_of_loaders_still_open(processes):
    code = (
        "import torch, isoshard.torch_bridge as xs, itertools, time\n"
        "from isoshard.torch_xla_bridge.loading import MpDeviceLoader\n"
        "def slow():\n"
        "    for n in itertools.count():\n"
        "        time.sleep(0.01)\n"
        "        yield torch.ones(64, 64)\n"
        "it = iter(MpDeviceLoader(slow(), 'jax')); print(next(it).sum().item())\n"
        "full = iter(MpDeviceLoader([torch.ones(4)] * 99, 'jax')); next(full)\n"
    )
    done = processes.run("-c", code, shutdown=True)
    assert done.returncode == 0 and done.stdout == "4096.0\n" and not done.stderr, done.stderr


def test_the_device_type_is_chosen_before_jax_runs(processes):
    code = """
import jax
from isoshard.torch_xla_bridge.torch_xla import runtime as xr
xr.set_device_type("TPU")
assert jax.config.jax_platforms == "tpu"
xr.set_device_type("CPU")
print(xr.device_type(), jax.config.jax_platforms, len(jax.devices()))
"""
    assert processes.run("-c", code, CPU_NUM_DEVICES="1").stdout == "CPU cpu 1\n"


CACHE = """
import torch
from isoshard.core import metrics
from isoshard.torch_xla_bridge.torch_xla import runtime as xr
try:
    xr.initialize_cache(FOLDER + "/none", readonly=True)
except FileNotFoundError as error:
    assert "there is no compilation cache" in str(error)
xr.initialize_cache(FOLDER, readonly=READONLY)
assert xr.get_num_cached_compilation_graph() == 0
x = torch.arange(4.0).to("jax")
assert (x + 1).FUNCTION().sum().isfinite().item()
assert xr.get_num_cached_compilation_graph() == 1
for wrong in range(2):
    try:
        xr.initialize_cache(FOLDER)
    except RuntimeError as error:
        message = str(error)
print(metrics.counters()["cache_hits"], message)
"""


def test_the_cache_serves_the_next_process(tmp_path, processes):
    folder = tmp_path / "cache"

    def start(readonly: bool, function: str = "exp") -> tuple[str, str, int]:
        code = CACHE.replace("FOLDER", repr(str(folder))).replace("FUNCTION", function)
        done = processes.run("-c", code.replace("READONLY", str(readonly)))
        hits, _, message = done.stdout.partition(" ")
        return hits, message or done.stderr, len(list(folder.glob("*-cache")))

    first, message, written = start(readonly=False)
    assert first == "0" and written > 0, message
    assert "initialised already, by an earlier call" in message
    assert start(readonly=True)[::2] == ("1", written)
    assert start(readonly=True, function="cos")[::2] == ("0", written)  # it is not written to
