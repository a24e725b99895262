"""Chooses the implementation of an op: the first that fits, or exactly the one asked for."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("k3jax")

Backend = tuple[Callable[..., Any], Callable[..., str | None]]
_logged: set[tuple[str, str]] = set()


def always(*_: Any) -> str | None:
    """The `unsupported` of a backend without limits."""


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
        reason = unsupported(*args)
        if reason is None:
            if (op, name) not in _logged:
                _logged.add((op, name))
                passed_over = "; ".join(f"not {other}: {why}" for other, why in reasons.items())
                logger.info(
                    "%s runs on backend %s%s", op, name, passed_over and f" ({passed_over})"
                )
            return function
        reasons[name] = reason
    raise ValueError(f"{op}: no backend can run this call: {reasons}")
