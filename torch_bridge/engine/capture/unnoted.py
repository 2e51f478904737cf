"""Where the code that runs need not be noted, since it is torch's and ours alone.

`Executed` is told by Python of each frame and each C function, which takes longer than most of them
do. Of the frames below an operation on the device, hundreds for a list of parameters, none can
read what a guard has to watch; but a dispatch mode, a class of tensors or an operator may be a
user's, and then its code is noted as all other is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from .executed import current


class Unnoted:
    """Context in which no code of this thread is noted, but for what `call` calls.

    Example:
        >>> from isoshard.torch_bridge.engine.capture.executed import Executed
        >>> with Executed() as executed, Unnoted() as unnoted:
        ...     _ = (lambda: "hidden")(), unnoted.call(lambda: "noted", (), {})
        >>> [name for name in ("hidden", "noted") if name in executed.names]
        ['noted']
    """

    __slots__ = ("_noting",)

    def __enter__(self) -> Unnoted:
        """Stop what notes, if it is one of ours."""
        self._noting = None if current() is None else sys.getprofile()
        if self._noting is not None:
            sys.setprofile(None)
        return self

    def __exit__(self, *exc: object) -> None:
        """Go on."""
        if self._noting is not None:
            sys.setprofile(self._noting)

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call what may run anybody's code, which is noted."""
        if self._noting is None:
            return function(*args, **kwargs)
        sys.setprofile(self._noting)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)
