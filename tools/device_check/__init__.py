"""Check isoshard on an accelerator, or with tiny sizes on the CPU: `python -m tools.device_check`.

    python -m tools.device_check                            on the GPU, in at most 8 minutes
    python -m tools.device_check --device cpu               tiny sizes on the CPU
    python -m tools.device_check --only exchange,operators  these sections only
    python -m tools.device_check --wheels FOLDER            install these wheels for this run
    python -m tools.device_check --write-docs FILE          write the figures of a GPU into the docs

The check needs isoshard, torch and JAX for the device, and no network; docs/benchmarks.md, "On a
GPU", lists what to install. `sections.py` lists the sections. Each part of a section runs in its
own process with a time limit, so that a failure, a hang or a crash does not end the other parts,
and so that a peak of memory belongs to one program. The results are written to
`out/device_check.json`.

- `sections`: the parts of each section, time limits, and what counts as a failure.
- `running`: runs the parts and assembles the results.
- `part`: the entry point of a part's process.
- `report`: the table on the terminal, and the figures in the docs.
- `environment`, `samples`, `exchange`, `training`, `decode`, `planner`, `operators`: the parts.

`sections`, `running`, `part` and `report` import neither JAX nor torch.
"""
