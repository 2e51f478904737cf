"""What runs is noted: functions called, in threads too, and the rows of tables."""

import subprocess
import sys
import threading

import pytest

from isoshard.core.layout import op_sharding
from isoshard.core.runtime import metrics
from tests.checkout import of_this_checkout
from tools.tiers import sources, tracing
from tools.tiers.lowerings import Lowerings


@of_this_checkout
def test_files_that_run_are_noted_and_no_others():
    with tracing.executed() as files:
        metrics.counters()
    assert "core/runtime/metrics.py" in files
    assert not any(name.startswith("torch_bridge/lowerings/") for name in files)
    assert all((sources.ROOT / name).is_file() for name in files)


@of_this_checkout
def test_threads_are_seen():
    with tracing.executed() as files:
        thread = threading.Thread(
            target=lambda: op_sharding.parse_op_sharding("{replicated}", ndim=1, num_devices=1)
        )
        thread.start()
        thread.join(60)
    assert "core/layout/op_sharding.py" in files


def test_the_tracer_before_is_there_again():
    before = sys.gettrace()
    with tracing.executed():
        assert sys.gettrace() is not before
    assert sys.gettrace() is before


PROGRAM = """
import isoshard as iso
iso.simulate_devices(2)
from tools.tiers.lowerings import Lowerings
from tools.tiers import tracing
watched = Lowerings()
import torch
x = torch.ones(3).to("jax")
watched.ran.clear()
with tracing.executed() as files:
    y = x.sin().tolist()
print(sorted(watched.ran), sorted(watched.files), sorted(files))
for operator in ("special.zeta", "nn.functional.gelu", "var.unbiased", "linalg.svd", "no.such"):
    print(operator, *sorted(watched.registering(operator)))
"""


@of_this_checkout
def test_a_row_of_a_table_is_noted_by_its_file():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True
    )
    first, *rows = done.stdout.splitlines()
    ran, registered, executed = (line.split("'")[1::2] for line in first.split("] ["))
    assert ran == ["aten::sin"]
    assert registered == ["torch_bridge/lowerings/elementwise.py"]
    assert "torch_bridge/engine/operators/dispatch.py" in executed
    folder = "torch_bridge/lowerings"
    assert rows == [
        f"special.zeta {folder}/zeta.py",
        f"nn.functional.gelu {folder}/activation.py",
        f"var.unbiased {folder}/reduce.py",
        f"linalg.svd {folder}/linalg.py",
        "no.such",
    ]


def test_a_bridge_that_was_imported_before_is_refused():
    import isoshard.torch_bridge  # noqa: F401

    with pytest.raises(RuntimeError, match=r"make Lowerings\(\) first"):
        Lowerings()
