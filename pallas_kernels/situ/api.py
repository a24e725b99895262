"""The activation of the feed-forward layers (K3 report, Eq. 12)."""

from jaxtyping import Array, Float

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.situ import chunked, triton_gpu

BACKENDS: dict[str, dispatch.Backend] = {
    "triton_gpu": (triton_gpu.triton_gpu, triton_gpu.unsupported),
    "chunked": (chunked.chunked, dispatch.always),
}


def situ(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    gate_cap: float,
    up_cap: float | None,
    *,
    backend: str | None = None,
) -> Float[Array, "*shape"]:
    """SiTU-GLU: a SwiGLU whose two branches saturate.

        a(g, u) = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2)  (K3 report, Eq. 12)

    Args:
        gate: pre-activation g.
        up: pre-activation u.
        gate_cap: b1 > 0.
        up_cap: b2 > 0, or None for a linear up branch.
        backend: `triton_gpu` or `chunked` must run; None takes the first that can. A kernel stands
            alone: where other elementwise work surrounds the activation, `chunked` fuses with it.

    Returns: the product in gate's dtype, |a| <= b1 b2.
    Numerics: float32 inside, rounded once.
    """
    return dispatch.choose("situ", BACKENDS, backend, gate, up)(gate, up, gate_cap, up_cap)
