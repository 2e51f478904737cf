"""Writing and reading one checkpoint: torch's planners and files, driven step by step.

It is what `torch.distributed.checkpoint.save` and `load` do, without their warnings where there is
one process, and with errors as they were raised.
"""

from __future__ import annotations

from torch.distributed.checkpoint.stateful import Stateful

from isoshard.core.checkpoint.store import Store, Sum
from isoshard.core.processes.coordination import ProcessGroup
from isoshard.torch_bridge._torch_internals.checkpoint_types import STATE_DICT_TYPE

from .load_planner import SPMDLoadPlanner
from .save_planner import SPMDSavePlanner
from .torch_files import Files, Reader, Writer


def expanded(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """The state dict, with the state dicts of modules, optimizers and other `Stateful`s in it."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state_dict.items()
    }


def write(
    store: Store,
    folder: str,
    state_dict: STATE_DICT_TYPE,
    group: ProcessGroup,
    threads: int,
    name: str,
) -> dict[str, Sum]:
    """Write a state dict into a folder; the sums of all files, in the first process.

    Args:
        store: of the checkpoints.
        folder: one for all processes.
        state_dict: nested.
        group: that writes together.
        threads: of each process.
        name: of the checkpoint, as the folder is still a temporary one.
    """
    files = Files(store)
    writer = Writer(files, folder, threads, name)
    planner = SPMDSavePlanner()
    first = group.rank == 0

    def plan_locally():
        planner.set_up_planner(state_dict, writer.storage_meta(), first)
        writer.set_up_storage_writer(first, rank=group.rank)
        return writer.prepare_local_plan(planner.create_local_plan())

    def plan_all():
        planned, metadata = planner.create_global_plan(local)
        return writer.prepare_global_plan(planned), metadata

    local = group.gather(plan_locally)
    plans, metadata = group.broadcast(plan_all)
    plan = planner.finish_plan(plans[group.rank])
    results = group.gather(lambda: writer.write_data(plan, planner).wait())
    group.broadcast(lambda: writer.finish(metadata, results))
    return {name: sum for sums in group.gather(lambda: files.sums) for name, sum in sums.items()}


def read(store: Store, folder: str, state_dict: STATE_DICT_TYPE, group: ProcessGroup) -> None:
    """Fill a state dict from a checkpoint.

    Args:
        store: of the checkpoints.
        folder: of the checkpoint.
        state_dict: nested; tensors are filled in place, other values replaced.
        group: that reads together.
    """
    reader = Reader(Files(store), folder)
    planner = SPMDLoadPlanner()
    first = group.rank == 0
    inner = expanded(state_dict)

    def plan_locally():
        metadata = reader.read_metadata()
        planner.set_up_planner(inner, metadata, first)
        reader.set_up_storage_reader(metadata, first)
        return reader.prepare_local_plan(planner.create_local_plan())

    plans = reader.prepare_global_plan(planner.create_global_plan(group.all_gather(plan_locally)))
    plan = planner.finish_plan(plans[group.rank])
    group.run(lambda: reader.read_data(plan, planner).wait())
    for key, value in list(state_dict.items()):
        if isinstance(value, Stateful):
            value.load_state_dict(inner[key])
        else:
            state_dict[key] = inner[key]
