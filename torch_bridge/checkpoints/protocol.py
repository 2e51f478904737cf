"""Writing and reading one checkpoint: torch's planners and files, driven step by step.

It is what `torch.distributed.checkpoint.save` and `load` do, without their warnings where there is
one process, and with errors as they were raised.
"""

from __future__ import annotations

from torch.distributed.checkpoint.stateful import Stateful

from isoshard.core.checkpoint.manifest import Sum
from isoshard.torch_bridge._torch_internals.checkpoint_types import STATE_DICT_TYPE

from .load_planner import SPMDLoadPlanner
from .ranks import Ranks
from .remote_storage import Storage
from .save_planner import SPMDSavePlanner
from .torch_files import Files, Reader, Writer


def expanded(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """The state dict; modules, optimizers and the like in it become state dicts themselves."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }


def write(
    storage: Storage,
    folder: str,
    state_dict: STATE_DICT_TYPE,
    ranks: Ranks,
    threads: int,
    name: str,
) -> dict[str, Sum]:
    """Write a state dict.

    Args:
        storage: where.
        folder: into which folder, of all processes.
        state_dict: nested.
        ranks: that write together.
        threads: of each process.
        name: what the checkpoint calls itself.

    Returns:
        Every file that any process wrote.
    """
    files = Files(storage)
    writer = Writer(files, folder, threads, name)
    planner = SPMDSavePlanner()
    first = ranks.rank == 0

    def plan_mine():
        planner.set_up_planner(state_dict, writer.storage_meta(), first)
        writer.set_up_storage_writer(first, rank=ranks.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all():
        planned, metadata = planner.create_global_plan(local)
        return writer.prepare_global_plan(planned), metadata

    local = ranks.each(plan_mine)
    plans, metadata = ranks.first(plan_all)
    mine = planner.finish_plan(plans[ranks.rank])
    results = ranks.each(lambda: writer.write_data(mine, planner).wait())
    ranks.first(lambda: writer.finish(metadata, results))
    return {name: found for sums in ranks.each(lambda: files.sums) for name, found in sums.items()}


def read(storage: Storage, folder: str, state_dict: STATE_DICT_TYPE, ranks: Ranks) -> None:
    """Fill a state dict from a checkpoint.

    Args:
        storage: where.
        folder: of the checkpoint.
        state_dict: nested; tensors are filled in place, other values replaced.
        ranks: that read together.
    """
    reader = Reader(Files(storage), folder)
    planner = SPMDLoadPlanner()
    first = ranks.rank == 0
    inner = expanded(state_dict)

    def plan_mine():
        metadata = reader.read_metadata()
        planner.set_up_planner(inner, metadata, first)
        reader.set_up_storage_reader(metadata, first)
        return reader.prepare_local_plan(planner.create_local_plan())

    plans = reader.prepare_global_plan(planner.create_global_plan(ranks.each(plan_mine)))
    mine = planner.finish_plan(plans[ranks.rank])
    ranks.each(lambda: reader.read_data(mine, planner).wait())
    for key, value in list(state_dict.items()):
        if isinstance(value, Stateful):
            value.load_state_dict(inner[key])
        else:
            state_dict[key] = inner[key]
