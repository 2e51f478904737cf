"""Bytes that each device receives in one run of a compiled program.

>>> program = '''
... ENTRY %main (p: f32[8]) -> f32[32] {
...   %cp = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,3}}
...   ROOT %ag = f32[32]{0} all-gather(%cp), replica_groups={{0,1,2,3}}, dimensions={0}
... }'''
>>> received(program, 4).tolist()
[96.0, 128.0, 128.0, 128.0]

A collective-permute gives its result to the devices that it names, and nothing to one that sends to
itself. The others cost what the best known algorithm does for a result of `b` bytes among `g`
devices: all-gather and all-to-all `b (g - 1) / g`, reduce-scatter `b (g - 1)`, all-reduce
`2 b (g - 1) / g`.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH (https://doi.org/10.1177/1094342005051521), section 4.
"""

from __future__ import annotations

import numpy as np

from isoshard.core.runtime.hlo_collectives import Collective, collectives


def received(program: str, devices: int) -> np.ndarray:
    """Count what the devices receive.

    Args:
        program: the optimised HLO of one device; loops count as often as they run.
        devices: how many run it.

    Returns:
        float64[devices], bytes.
    """
    none = np.zeros(devices)
    return sum(
        (
            collective.times * _in_single_run(collective, devices)
            for collective in collectives(program)
        ),
        none,
    )


def _in_single_run(collective: Collective, devices: int) -> np.ndarray:
    if collective.kind == "collective_permute":
        reached = [target for source, target in collective.groups or () if source != target]
        return collective.bytes * np.bincount(np.array(reached, int), minlength=devices)
    group = len(collective.groups[0]) if collective.groups else devices
    share = (group - 1) / group
    factor = {"all_reduce": 2 * share, "reduce_scatter": group - 1}.get(collective.kind, share)
    return np.full(devices, collective.bytes * factor)
