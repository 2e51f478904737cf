"""`python tools/device_check.py`: `python -m tools.device_check` from any folder."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # instead of this folder

from tools.device_check.__main__ import main  # noqa: E402  (the package; it goes before a module)

if __name__ == "__main__":
    sys.exit(main())
