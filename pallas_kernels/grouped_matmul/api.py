"""The grouped matmul: entry point and choice of backend."""

import jax
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.grouped_matmul import blocked, ragged, reference


def backends() -> dict[str, dispatch.Backend]:
    """Backends, best first.

    Off TPU `ragged_dot` expands to one dense product per group, E times the work and memory
    (KF-063), so there it only runs when asked for.
    """
    ragged_dot = {"ragged": (ragged.ragged, dispatch.always)}
    plain = {
        "blocked": (blocked.blocked, dispatch.always),
        "reference": (reference.dense, dispatch.always),
    }
    return ragged_dot | plain if jax.default_backend() == "tpu" else plain | ragged_dot


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    *,
    backend: str | None = None,
) -> Float[Array, "M N"]:
    """Multiply each row by the matrix of its group.

        y_m = x_m w_e   for the group e that row m lies in      (architecture 8, step 5)

    Args:
        x: rows sorted by group.
        w: one matrix per group, in x's dtype.
        group_sizes: rows of each group, in order, 0 allowed; rows beyond their sum give 0.
        backend: `ragged`, `blocked` or `reference`; None takes the first that can run.

    Returns: products in x's dtype.
    Numerics: float32 accumulation.
    Cost: 2 M K N and the padding of each group to whole blocks.
    """
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape} do not fit [M, K] and [E, K, N]")
    if group_sizes.shape != (w.shape[0],):
        raise ValueError(f"group_sizes has shape {group_sizes.shape}, w has {w.shape[0]} groups")
    return dispatch.choose("grouped_matmul", backends(), backend)(x, w, group_sizes)
