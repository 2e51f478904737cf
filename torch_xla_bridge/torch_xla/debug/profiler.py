"""Profiles, by torch_xla's names, with JAX's profiler.

    import torch_xla.debug.profiler as xp

Traces are read with TensorBoard's profile plugin or with xprof.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from isoshard.torch_bridge.kit import runtime
from isoshard.torch_xla_bridge.session.replicas import is_master_ordinal

_port: int | None = None


def start_server(port: int, only_on_master: bool = True) -> object | None:
    """Let profiling clients connect to this process. There is one server in a process.

    Args:
        port: where it listens.
        only_on_master: only in a master process.

    Returns:
        The server, which runs as long as the process; None where it was not started.

    Raises:
        RuntimeError: there is a server already, or the port cannot be used.
        ValueError: it is no port.
    """
    global _port
    if only_on_master and not is_master_ordinal():
        return None
    if not 0 < port < 2**16:
        raise ValueError(f"{port} is no port; give a number from 1 to 65535")
    if _port is not None:
        raise RuntimeError(f"the profiler server of this process runs already, on port {_port}")
    server = jax.profiler.start_server(port)
    _port = port
    return server


def trace(
    service_addr: str,
    logdir: str,
    duration_ms: int = 1000,
    num_tracing_attempts: int = 3,
    host_tracer_level: int = 2,
    device_tracer_level: int = 1,
    delay_ms: int = 0,
    timeout_s: int = 120,
    interval_s: int = 5,
) -> None:
    """Profile this process for a while, and wait for the end.

    Spans, operations and programs are noted, Python functions are not: see `start_trace`.

    Args:
        service_addr: `"localhost:PORT"` of the server that `start_server` runs in this process.
        logdir: folder for the profile.
        duration_ms: for how long.
        num_tracing_attempts: not used; a profile of one's own process needs one.
        host_tracer_level: 0 to 3; how much of the host's work is noted.
        device_tracer_level: not used; JAX always notes the devices' work.
        delay_ms: begin after so long.
        timeout_s: not used.
        interval_s: not used.

    Raises:
        ValueError: the server runs in another process, which JAX has no function for.
        RuntimeError: a profile is being taken already.
    """
    host, _, port = service_addr.rpartition(":")
    if host not in ("localhost", "127.0.0.1", "[::1]") or port != str(_port):
        raise ValueError(
            f"the profiler server at {service_addr!r} is not this process's "
            f"({f'localhost:{_port}' if _port else 'which has none'}). For another process use "
            "`python -m jax.collect_profile PORT DURATION_MS`, or the capture button of xprof."
        )
    time.sleep(delay_ms / 1000)
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = host_tracer_level
    # As torch_xla's. JAX's tracer of Python functions reads the names of C functions after they
    # are freed (0.9 to 0.12), and torch makes and drops such functions all the time.
    options.python_tracer_level = 0
    with jax.profiler.trace(logdir, profiler_options=options):
        time.sleep(duration_ms / 1000)


def trace_detached(*args: Any, **kwargs: Any) -> None:
    """As `trace`, in a thread of its own.

    Args:
        *args: see `trace`.
        **kwargs: see `trace`.
    """
    threading.Thread(target=trace, args=args, kwargs=kwargs).start()


class Trace(contextlib.AbstractContextManager["Trace"]):
    """Context that appears as a named span in the profile.

    Args:
        name: of the span.
        **kwargs: numbers and strings that are shown with it.

    >>> with Trace("forward", batch=3) as span:
    ...     span.name
    'forward'
    """

    def __init__(self, name: str, **kwargs: Any):
        """See the class."""
        self.name = name
        self._span: Any = jax.profiler.TraceAnnotation(name, **kwargs)

    def __enter__(self) -> Trace:
        """Begin the span."""
        self._span.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """End the span."""
        self._span.__exit__(*exc)


class StepTrace(Trace):
    """Context of a training step: a span that profiles count steps by. It ends with `sync`.

    Args:
        name: of the span.
        **kwargs: `step_num`, the number of the step, and what else is shown.
    """

    def __init__(self, name: str, **kwargs: Any):
        """See the class."""
        super().__init__(name)
        self._span = jax.profiler.StepTraceAnnotation(name, **kwargs)

    def __exit__(self, *exc: Any) -> None:
        """Execute what was recorded, and end the span."""
        try:
            runtime.sync()
        finally:
            super().__exit__(*exc)


def trace_me(scope: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: every call of the function is a span.

    Args:
        scope: name of the span.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            with Trace(scope):
                return function(*args, **kwargs)

        return traced

    return decorate


def start_trace(log_dir: os.PathLike[str] | str) -> None:
    """Begin to profile this process, Python functions among the rest.

    Args:
        log_dir: folder for the profile.

    Raises:
        RuntimeError: a profile is being taken already.
    """
    jax.profiler.start_trace(os.fspath(log_dir))


def stop_trace() -> None:
    """Write the profile.

    Raises:
        RuntimeError: none is being taken.
    """
    jax.profiler.stop_trace()
