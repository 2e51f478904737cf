"""A compiler that does what its programs say: `pass`, `refuse`, `crash`, `hang`, `lines`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer as `compiling.py` does."""
    target = json.loads(Path(sys.argv[1]).read_text())
    if target["machine"] == "nothing":
        sys.exit("no such compiler is installed")
    print(json.dumps({"ready": True, "versions": {"fake": "1.0"}}), flush=True)
    for line in sys.stdin:
        what = Path(json.loads(line)["path"]).read_text()
        if what == "crash":
            print("the program is too much", file=sys.stderr, flush=True)
            os.abort()
        if what == "hang":
            time.sleep(600)
        if what == "lines":
            print("a remark of a compiler\n\nanother", flush=True)
        reason = {"reason": "Refused: no"} if what == "refuse" else {}
        status = "refused" if what == "refuse" else "pass"
        print(json.dumps({"status": status, "seconds": 0.5, **reason}), flush=True)


if __name__ == "__main__":
    main()
