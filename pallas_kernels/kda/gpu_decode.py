"""One token of KDA per request on an NVIDIA GPU: each memory is read once and written once, in place."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import triton_call

WIDEST = 256  # key channels that a program holds in registers
COLUMNS, WARPS = 64, 4  # value channels of a program, and its warps


def unsupported(q, v, state) -> str | None:
    """Why the kernel cannot run a call, or None."""
    if (reason := triton_call.unavailable()) is not None:
        return reason
    if jnp.promote_types(q.dtype, jnp.float32) != jnp.float32:
        return f"q is {q.dtype}; computes in float32"
    if q.shape[-1] > WIDEST:
        return f"{q.shape[-1]} key channels; takes up to {WIDEST}"
    if v.size == 0 or state.size == 0:
        return "there is nothing to compute"
    return None


def triton_gpu(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV K"],
    beta: Float[Array, "B HV"],
    state: Float[Array, "N HV K V"],
    slots: Int[Array, " B"] | None,
    has_state: Bool[Array, " B"] | None,
    erase: bool,
) -> tuple[Float[Array, "B HV V"], Float[Array, "N HV K V"]]:
    """Outputs in v's dtype and the new memories; arguments as in `decode.kda_step`."""
    from k3jax.pallas_kernels.kda import gpu_decode_kernel

    (B, H, K), (HV, V) = q.shape, v.shape[1:]
    # What is not given is not read: anything stands for it but the state, which would be copied.
    row = beta if slots is None else slots.astype(jnp.int32)
    has = beta if has_state is None else has_state.astype(jnp.int32)
    blocks = -(-V // COLUMNS)
    o, new = triton_call.triton_call(
        gpu_decode_kernel.step, q, k, v, g.astype(jnp.float32), beta, state.astype(jnp.float32),
        row, has,
        out_shape=[
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
        ],
        grid=(B * HV * blocks,), num_warps=WARPS, aliases={5: 1},
        N=state.shape[0], H=H, HV=HV, K=K, V=V, POOL=slots is not None, HAS=has_state is not None,
        ERASE=erase, ROWS=triton_call.power_of_two(K), COLUMNS=COLUMNS,
    )  # fmt: skip
    return o, new
