"""Run by `tests/fresh.py`: every model of a folder, on eight devices, without torch.

For each `NAME.onnx` with inputs `NAME.npz`: the outputs, the shards of every parameter and the
compiled programs are left beside it.
"""

import json
import sys
from pathlib import Path

import numpy as np

import isoshard as iso


def main(folder):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
    iso.simulate_devices(8)
    for path in sorted(folder.glob("*.onnx")):
        compiled = iso.onnx.compile(path)
        inputs = dict(np.load(path.with_suffix(".npz")))
        np.save(path.with_suffix(".npy"), compiled(**inputs))
        pieces = [
            {
                name: {s.device.id: list(s.data.shape) for s in array.addressable_shards}
                for name, array in stage.items()
            }
            for stage in compiled.parameters
        ]
        found = {"pieces": pieces, "hlo": compiled.hlo(**inputs)}
        path.with_suffix(".json").write_text(json.dumps(found))
    if "torch" in sys.modules:
        raise SystemExit("running a model has loaded torch")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
