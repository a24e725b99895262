"""Dense building blocks: the linear map, the SiTU-GLU activation, the feed-forward layer."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from k3jax.pallas_kernels.situ import situ
from k3jax.pallas_kernels.situ.chunked import chunked
from k3jax.sharding.annotate import contracted, gathered, param, psum


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """The product that joins the gate and up branches of every feed-forward layer."""

    kind: Literal["situ", "swiglu"]  # "situ": capped branches (K3); "swiglu": silu(gate) * up
    gate_cap: float | None  # beta_1, bound of the gate branch, same unit as its input; situ only
    up_cap: float | None  # beta_2, bound of the up branch; None leaves it linear; situ only

    def __post_init__(self):
        if self.kind not in ("situ", "swiglu"):
            raise ValueError(f"activation.kind={self.kind!r} is unknown: use 'situ' or 'swiglu'")
        if self.kind == "situ" and self.gate_cap is None:
            raise ValueError("activation.gate_cap=None: kind='situ' needs a number (K3 uses 4.0)")
        for name in ("gate_cap", "up_cap"):
            cap = getattr(self, name)
            if cap is None:
                continue
            if self.kind == "swiglu":
                raise ValueError(f"activation.{name}={cap}: kind='swiglu' has no caps, set None")
            if not 0 < cap < math.inf:
                raise ValueError(f"activation.{name}={cap} must be a finite number above 0")

    def __call__(
        self, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """The activation of a (gate, up) pair, in gate's dtype, float32 inside.

        In plain JAX, for callers that do more to the product, or call this inside a kernel.
        """
        if self.kind == "situ":
            assert self.gate_cap is not None
            return chunked(gate, up, self.gate_cap, self.up_cap)
        return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

    def alone(
        self, gate: Float[Array, "*shape"], up: Float[Array, "*shape"]
    ) -> Float[Array, "*shape"]:
        """The same between two matmuls, with which nothing fuses: by a kernel if one can."""
        if self.kind == "situ":
            assert self.gate_cap is not None
            return situ(gate, up, self.gate_cap, self.up_cap)
        return self(gate, up)


class Linear(nnx.Module):
    """y = x W without bias, over any number of input and output dimensions.

    The kernel is stored as `[*in_shape, *out_shape]`, so heads are dimensions and not reshapes.
    Compute happens in x's dtype: the kernel is cast where it is used. On a mesh its output
    dimensions may be split, and a product over split input dimensions is summed over the devices.

    Args:
        in_shape: trailing dimensions of x that are contracted.
        out_shape: dimensions that take their place.
        axes: logical axis names, one per kernel dimension.
        rngs: source of the initialisation key.
        init_std: standard deviation of the normal initialisation.
        param_dtype: storage dtype.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        rngs: nnx.Rngs,
        init_std: float,
        param_dtype: str = "float32",
    ):
        self.num_in = len(in_shape)
        init = nnx.initializers.normal(init_std)
        self.kernel = param(rngs, init, (*in_shape, *out_shape), axes, param_dtype)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = jnp.tensordot(x, gathered(self.kernel, x.dtype), axes=self.num_in)
        return psum(y, *contracted(self.kernel, self.num_in))


class FeedForward(nnx.Module):
    """Dense feed-forward layer: down(activation(gate x, up x)), width -> ffn_dim -> width."""

    def __init__(
        self,
        width: int,
        ffn_dim: int,
        *,
        activation: ActivationConfig,
        rngs: nnx.Rngs,
        init_std: float,
        param_dtype: str = "float32",
    ):
        kwargs = {"rngs": rngs, "param_dtype": param_dtype, "init_std": init_std}
        self.activation = activation
        self.gate_proj = Linear((width,), (ffn_dim,), ("embed", "ffn"), **kwargs)
        self.up_proj = Linear((width,), (ffn_dim,), ("embed", "ffn"), **kwargs)
        self.down_proj = Linear((ffn_dim,), (width,), ("ffn", "embed"), **kwargs)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return self.down_proj(self.activation.alone(self.gate_proj(x), self.up_proj(x)))
