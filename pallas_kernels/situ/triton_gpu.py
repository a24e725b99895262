"""SiTU-GLU on an NVIDIA GPU: one Triton kernel forward, one backward, which reads both inputs again."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from k3jax.pallas_kernels import triton_call

BLOCK, WARPS = 1024, 2  # elements of a program, and its warps
SMALLEST = 2**20  # elements: less is a matter of launches, and XLA fuses it with what is around


def unsupported(gate, up) -> str | None:
    """Why the kernels cannot run a call, or None."""
    if (reason := triton_call.unavailable()) is not None:
        return reason
    for name, x in (("gate", gate), ("up", up)):
        if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"{name} is {x.dtype}; computes in float32"
    if gate.size < SMALLEST:
        return f"{gate.size} elements; fuses with its surroundings up to {SMALLEST}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def triton_gpu(
    gate: Float[Array, "*shape"],
    up: Float[Array, "*shape"],
    gate_cap: float,
    up_cap: float | None,
) -> Float[Array, "*shape"]:
    """The activation by the fused kernels; arguments as in `api.situ`.

    Cost: reads gate and up and writes the result; backward reads them and its cotangent and writes
        theirs.
    """
    from k3jax.pallas_kernels.situ import gpu_kernels

    return _launch(gpu_kernels.forward, gate_cap, up_cap, gate, up, like=[gate])[0]


def _forward(gate, up, gate_cap, up_cap):
    return triton_gpu(gate, up, gate_cap, up_cap), (gate, up)


def _backward(gate_cap, up_cap, residuals, d_out):
    from k3jax.pallas_kernels.situ import gpu_kernels

    gate, up = residuals
    launched = _launch(gpu_kernels.backward, gate_cap, up_cap, gate, up, d_out, like=[gate, up])
    return tuple(launched)


triton_gpu.defvjp(_forward, _backward)


def _launch(kernel, gate_cap, up_cap, *args, like):
    size = args[0].size
    return triton_call.triton_call(
        kernel, *args, out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        grid=(-(-size // BLOCK),), num_warps=WARPS, N=size, GATE_CAP=gate_cap, UP_CAP=up_cap,
        EXACT=triton_call.INTERPRETED, BLOCK=BLOCK,
    )  # fmt: skip
