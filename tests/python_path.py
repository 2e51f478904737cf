"""Where a test's subprocess finds isoshard: installed, or on PYTHONPATH (`tools.versions`)."""

from __future__ import annotations

import os


def python_path(*folders: object) -> str:
    """A PYTHONPATH of folders, before what it is here.

    Args:
        *folders: paths or texts.
    """
    return os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
