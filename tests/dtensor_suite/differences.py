"""What is known of single cases of PyTorch 2.6's tests: no meaning here, or another answer.

A case in `NEED_RANKS` is not run. In others a statement is known to want what isoshard does
otherwise on purpose (docs/dtensor.md says why): `DECIDED` names its line, the statement's failure
is noted, and the rest of the case has to hold.
"""

from __future__ import annotations

import fnmatch

_GENERATOR = "reads the state of torch's tracker of random numbers, of CUDA's generators"
_SCHEMAS = "is about torch's own rules of sharding and its model of their cost"
_GROUP = "exchanges over a process group"
_TRACES = "reads torch's record of the operators of each module"

NEED_RANKS: dict[str, str] = {
    "test_comm_mode::*::test_comm_mode": _GROUP,
    "test_comm_mode::*::test_comm_mode_coalesced": _GROUP,
    "test_comm_mode::*::test_comm_mode_with_c10d": _GROUP,
    "test_comm_mode_features::*_module_tracing": _TRACES,
    "test_tp_transform::*": "is a transformation of traced programs that torch has taken out",
    "test_dtensor::*::test_metadata_consistency_check": "ranks give tensors that do not agree",
    "test_dtensor::*::test_from_local_uneven_sharding": "each rank gives a piece of another size",
    "test_dtensor::*::test_dtensor_save_load_import": "a process that imports torch alone loads",
    "test_dtensor::*::test_split_tensor_1D": "calls `Shard._split_tensor`, which changed in torch",
    "test_op_strategy::*": _SCHEMAS,
    "test_optimizers::*foreach_supported_types*": "reads a list that torch keeps of its classes",
    "test_random_ops::*manual_seed*": _GENERATOR,
    "test_random_ops::*rng_tracker*": _GENERATOR,
    "test_random_ops::*deterministic*": _GENERATOR,
    "test_random_ops::*meta_init": _GENERATOR,
    "test_random_ops::*meta_tensor_init": _GENERATOR,
    "test_random_ops::*init_ops": _GENERATOR,
    "test_tp_random_state::*": _GENERATOR,
    "test_parallelize_api::*::test_linear_row_wise_parallel": "each rank gives another piece",
    "test_redistribute::*::test_replicate_to_partial": "calls torch's function of autograd itself",
    "test_redistribute::*::test_shard_dim_alltoall": "calls a private exchange of torch",
    "test_utils::TestStridedSharding::*": "calls a private exchange of torch",
    "test_utils::*::test_fsdp2_tp_2d_*": "each rank gives a piece of its own",
    "test_utils::*::test_strided_sharding_assumption_*": "calls a private check of torch",
}
"""Patterns of `file::case`, with what the case is about."""

OWN_TENSORS = frozenset({"test_parallelize_api", "test_tp_style"})
"""Files in which a tensor on no mesh that goes into a parallel module is each rank's own.

In `test_tp_examples` it is a whole, as a model trained on one process has it.
"""

_SUM = "the sum over a split axis is taken at once, and the test counts with a term of it"
_MIX = "parts of one mesh mix in an operation"
_WAITING = "a result is no AsyncCollectiveTensor: JAX waits where a value is read"
_META = "meta tensors become `empty` ones on the devices"
_STAYS = "what a softmax runs along may stay split"
_OWN = "each rank has random numbers of its own there"

DECIDED: dict[str, dict[int, str]] = {
    "test_api": {283: "torch refuses, too, to distribute a module twice by now"},
    "test_dtensor": {
        103: _META,
        439: _WAITING,
        440: _WAITING,
        444: _WAITING,
        445: _WAITING,
        451: _WAITING,
        809: _SUM,
        898: _MIX,
    },
    "test_dtensor_ops": {53: "torch 2.6's database of operators had one that is gone"},
    "test_embedding_ops": {154: "`max_norm` works"},
    "test_math_ops": {116: _STAYS, 229: _STAYS},
    "test_parallelize_api": {201: "a style that is given a whole gives a whole"},
    "test_tensor_ops": {195: _SUM, 295: _OWN, 309: _OWN},
}
"""By file and line of PyTorch 2.6: why isoshard answers otherwise."""


def need_of(file: str, case: str) -> str | None:
    """Why a case has no meaning on one process; None if it has one."""
    name = f"{file}::{case}"
    return next((why for one, why in NEED_RANKS.items() if fnmatch.fnmatchcase(name, one)), None)
