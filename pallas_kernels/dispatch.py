"""Chooses the implementation of an op: the first that fits, or exactly the one asked for."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

logger = logging.getLogger("k3jax")

Backend = tuple[Callable[..., Any], Callable[..., str | None]]
# Backends that are taken unasked on one platform only, and where a device has all of its arrays to
# itself. Asked for, they run anywhere they can: on
# another host they compile ahead of time, or are interpreted.
NATIVE = {"pallas_tpu": "tpu", "triton_gpu": "gpu"}
_used: dict[str, list[str]] = {}


def always(*_: Any) -> str | None:
    """The `unsupported` of a backend without limits."""


def used(op: str) -> tuple[str, ...]:
    """The backends that `op` has run on in this process, in the order of their first use."""
    return tuple(_used.get(op, ()))


def all_used() -> dict[str, tuple[str, ...]]:
    """The backends of every op that ran or was traced in this process."""
    return {op: tuple(names) for op, names in _used.items()}


def platform() -> str:
    """What the program being traced is for: the mesh's devices may be another kind than this
    process runs on, where it is compiled ahead of time."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def _sharers() -> int:
    """How many devices may hold the call's arrays; the compiler cannot divide a kernel."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count()
    return 1 if mesh.are_all_axes_manual else mesh.size


def choose(op: str, backends: Mapping[str, Backend], requested: str | None, *args: Any) -> Callable:
    """The function that runs `op` for these arguments; the choice is logged once per op.

    Args:
        op: name of the op, for messages.
        backends: name -> (function, unsupported), best first; `unsupported(*args)` gives the reason
            why the backend cannot run the call, or None. `reference` only runs when asked for.
        requested: a backend that must run, or None for the first that can.
        args: what the backends judge the call by.
    """
    if requested is not None and requested not in backends:
        raise ValueError(f"{op}: unknown backend {requested!r}; choose one of {sorted(backends)}")
    candidates = [requested] if requested else [name for name in backends if name != "reference"]
    reasons = {}
    for name in candidates:
        function, unsupported = backends[name]
        if not requested and name in NATIVE:
            if NATIVE[name] != (here := platform()):
                reasons[name] = f"this is a {here}"
                continue
            if (devices := _sharers()) > 1:
                reasons[name] = f"{devices} devices, and this is outside shard_map"
                continue
        reason = unsupported(*args)
        if reason is None:
            if name not in (seen := _used.setdefault(op, [])):
                seen.append(name)
                passed_over = "; ".join(f"not {other}: {why}" for other, why in reasons.items())
                logger.info(
                    "%s runs on backend %s%s", op, name, passed_over and f" ({passed_over})"
                )
            return function
        reasons[name] = reason
    raise ValueError(f"{op}: no backend can run this call: {reasons}")
