"""docs/torch_xla.md lists every name of torch_xla with its state, which is compared with ours."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from isoshard.torch_xla_bridge import torch_xla

ROOT = Path(__file__).resolve().parents[2]
OURS = "isoshard.torch_xla_bridge."
STATES = ("offered", "different", "not supported")

# What the API pages of torch_xla's guide document.
GUIDE = {
    "torch_xla.core.xla_model": """
        xla_device get_xla_supported_devices xla_device_hw get_ordinal get_local_ordinal
        is_master_ordinal xrt_world_size all_reduce all_gather all_to_all add_step_closure
        wait_device_ops optimizer_step save rendezvous do_on_ordinals mesh_reduce set_rng_state
        get_rng_state get_memory_info get_stablehlo get_stablehlo_bytecode mark_step
    """,
    "torch_xla.core.functions": "all_reduce all_gather nms",
    "torch_xla.distributed.parallel_loader": "ParallelLoader MpDeviceLoader",
    "torch_xla.distributed.xla_multiprocessing": "spawn MpModelWrapper MpSerialExecutor",
    "torch_xla.utils.utils": "SampleGenerator DataWrapper",
    "torch_xla.utils.serialization": "save load",
    "torch_xla.distributed.spmd": """
        Mesh HybridMesh ShardingType ShardingSpec XLAShardedTensor XLAShard mark_sharding
        clear_sharding auto_policy xla_distribute_tensor xla_distribute_module
    """,
    "torch_xla.distributed.spmd.debugging": "visualize_tensor_sharding visualize_sharding",
    "torch_xla.experimental.distributed_checkpoint": """
        SPMDSavePlanner SPMDLoadPlanner CheckpointManager
    """,
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": "SpmdFullyShardedDataParallel",
    "torch_xla.distributed.fsdp": "XlaFullyShardedDataParallel checkpoint_module",
    "torch_xla.distributed.fsdp.wrap": "transformer_auto_wrap_policy",
    "torch_xla.runtime": """
        use_spmd is_spmd global_runtime_device_count initialize_cache device_type
    """,
    "torch_xla.debug.metrics": "metrics_report short_metrics_report counter_value metric_data",
}


def page() -> dict[str, dict[str, tuple[str, str]]]:
    """By module and name: the state and the note."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    module = ""
    for line in (ROOT / "docs" / "torch_xla.md").read_text().splitlines():
        if line.startswith("## "):
            module = line[3:].strip("`")
            found[module] = {}
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[1] in STATES:
            for name in re.findall(r"`([^`]+)`", cells[0]):
                assert name not in found[module], f"{module}.{name} stands twice"
                found[module][name] = (cells[1], cells[2])
    return found


PAGE = page()
NOT_THERE = PAGE.pop("Modules that are not supported")


def modules(package=torch_xla):
    """Every module of ours, by torch_xla's name."""
    yield package.__name__.removeprefix(OURS), package
    for info in pkgutil.iter_modules(getattr(package, "__path__", [])):
        yield from modules(importlib.import_module(f"{package.__name__}.{info.name}"))


@pytest.mark.parametrize("module", PAGE)
def test_what_is_said_to_be_there_can_be_imported(module):
    ours = importlib.import_module(OURS + module)
    for name, (state, note) in PAGE[module].items():
        if state != "not supported":
            assert hasattr(ours, name), f"{module}.{name} is {state}, and not there"
        if state != "offered":
            assert note, f"{module}.{name} is {state}, and nothing says why"


@pytest.mark.parametrize(("name", "module"), [pytest.param(*one, id=one[0]) for one in modules()])
def test_every_public_name_of_ours_stands_on_the_page(name, module):
    public = getattr(module, "__all__", [])
    missing = [member for member in public if member not in PAGE.get(name, {})]
    missing = [member for member in missing if not member.startswith("_")]
    assert not missing, f"docs/torch_xla.md says nothing of {name}: {missing}"


@pytest.mark.parametrize("module", GUIDE)
def test_every_name_of_the_guides_api_pages_stands_on_the_page(module):
    missing = [name for name in GUIDE[module].split() if name not in PAGE[module]]
    assert not missing, f"docs/torch_xla.md says nothing of {module}: {missing}"


@pytest.mark.parametrize("module", NOT_THERE)
def test_modules_that_are_said_not_to_be_there_are_not(module):
    assert NOT_THERE[module][1]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(OURS + module)
