"""The routed experts of a layer: their matrices, and which form of their product a call takes."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from k3jax.layers.feed_forward import ActivationConfig
from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.grouped_matmul import experts, experts_backward, experts_forward
from k3jax.pallas_kernels.grouped_matmul.composed import experts as composed_experts
from k3jax.pallas_kernels.grouped_matmul.few import experts_of_all, experts_of_few
from k3jax.pallas_kernels.mxfp4 import GROUP, dequantize_mxfp4, grouped_matmul_mxfp4
from k3jax.sharding.annotate import Buffer, axis_size, gathered, param
from k3jax.sharding.expert_parallel import apply_experts

MOST_TOKENS = 128  # of a decoding step in which every expert may read every token


@dataclass(frozen=True)
class ExpertsOp:
    """The feed-forward of the routed experts as `apply_experts` calls it; matrices are (w1, w3, w2)."""

    activation: ActivationConfig

    def __call__(self, rows, p, group_sizes, matrices):
        w1, w3, w2 = matrices
        return experts(rows, w1, w3, w2, p, group_sizes, self.activation)

    def forward(self, rows, p, group_sizes, matrices):
        w1, w3, w2 = matrices
        return experts_forward(rows, w1, w3, w2, p, group_sizes, self.activation)

    def backward(self, saved, dy, rows, p, group_sizes, matrices):
        w1, w3, w2 = matrices
        dx, dw1, dw3, dw2, dp = experts_backward(
            saved, dy, rows, w1, w3, w2, p, group_sizes, self.activation
        )
        return dx, dp, (dw1, dw3, dw2)

    def take(self, w: Any, ids: Int[Array, " rows"], dtype: Any) -> Float[Array, "rows ins outs"]:
        """The matrices of some experts."""
        return w[ids].astype(dtype)


@dataclass(frozen=True)
class PackedExpertsOp:
    """The same with matrices in MXFP4, each a pair (packed, scale)."""

    activation: ActivationConfig

    def __call__(self, rows, p, group_sizes, matrices):
        w1, w3, w2 = matrices

        def matmul(x, w, group_sizes):
            packed, scale = w
            return grouped_matmul_mxfp4(x, packed, scale, group_sizes)

        return composed_experts(matmul, rows, w1, w3, w2, p, group_sizes, self.activation)

    def forward(self, rows, p, group_sizes, matrices):
        raise ValueError("experts in MXFP4 cannot be trained: decode them first (moe.weights)")

    def backward(self, saved, dy, rows, p, group_sizes, matrices):
        raise ValueError("experts in MXFP4 cannot be trained: decode them first (moe.weights)")

    def take(self, w: Any, ids: Int[Array, " rows"], dtype: Any) -> Float[Array, "rows ins outs"]:
        packed, scale = w
        return dequantize_mxfp4(packed[ids], scale[ids], dtype).swapaxes(1, 2)


class Experts(nnx.Module):
    """The routed experts: E_j(z) = w2_j activation(w1_j z, w3_j z)."""

    op_type: ClassVar[type[ExpertsOp] | type[PackedExpertsOp]] = ExpertsOp
    w1: Any  # gate
    w3: Any  # up
    w2: Any  # down

    def __init__(
        self,
        num_experts: int,
        dim: int,
        ffn_dim: int,
        axis: str,
        *,
        activation: ActivationConfig,
        rngs: nnx.Rngs,
        param_dtype: str,
        init_std: float,
    ):
        self.num_experts, self.activation = num_experts, activation
        init = nnx.initializers.normal(init_std)
        up, down = ("experts", axis, "expert_ffn"), ("experts", "expert_ffn", axis)
        self.w1 = param(rngs, init, (num_experts, dim, ffn_dim), up, param_dtype)
        self.w3 = param(rngs, init, (num_experts, dim, ffn_dim), up, param_dtype)
        self.w2 = param(rngs, init, (num_experts, ffn_dim, dim), down, param_dtype)

    def matrices(self, dtype: Any = None) -> tuple[Any, Any, Any]:
        """w1, w3, w2 as the op reads them; parameters in `dtype`."""
        return gathered(self.w1, dtype), gathered(self.w3, dtype), gathered(self.w2, dtype)

    def __call__(
        self,
        z: Float[Array, "tokens L"],
        ids: Int[Array, "tokens A"],
        weights: Float[Array, "tokens A"],
        mask: Bool[Array, " tokens"] | None = None,
        keep_rows: bool = False,
        decoding: bool = False,
    ) -> Float[Array, "tokens L"]:
        """Weighted sum of each token's experts, float32; 0 for padding tokens.

        `keep_rows`: the backward pass follows at once, see `apply_experts`. `decoding`: none follows.
        """
        op = self.op_type(self.activation)
        if decoding and axis_size("expert") == 1 and (form := self._unsorted(ids)):
            if mask is not None:
                z, weights = jnp.where(mask[:, None], z, 0), jnp.where(mask[:, None], weights, 0)
            if form == "all":
                w1, w3, w2 = self.matrices(z.dtype)
                return experts_of_all(z, ids, weights, w1, w3, w2, self.activation)
            take = partial(op.take, dtype=z.dtype)
            return experts_of_few(z, ids, weights, self.matrices(), take, self.activation)
        return apply_experts(
            op,
            z,
            weights,
            ids,
            mask,
            self.num_experts,
            self.matrices(z.dtype),
            keep_rows=keep_rows,
        )

    def _unsorted(self, ids: Int[Array, "tokens A"]) -> str:
        """Form of a decoding step that sorts no rows: "few", "all", or "" if rows should be sorted.

        Of more choices than experts every expert is some token's: a GPU then reads all, once. A TPU has
        a kernel for sorted rows.
        """
        if ids.size <= self.num_experts:
            return "few"
        on_gpu = dispatch.platform() in ("gpu", "cuda", "rocm")
        whole = self.op_type is ExpertsOp and ids.shape[0] <= MOST_TOKENS
        return "all" if on_gpu and whole else ""


class PackedMatrices(nnx.Module):
    """One matrix [out, in] of every expert in MXFP4; zeros until codes are loaded."""

    def __init__(self, num_experts: int, out_dim: int, in_dim: int):
        def codes(size):
            shape, axes = (num_experts, out_dim, size), ("experts", None, None)
            return Buffer(jnp.zeros(shape, jnp.uint8), logical_axes=axes, global_shape=shape)

        self.packed = codes(in_dim // 2)
        self.scale = codes(in_dim // GROUP)


class PackedExperts(Experts):
    """Routed experts whose matrices stay in 4 bits: buffers, which are not trained."""

    op_type = PackedExpertsOp

    def __init__(self, num_experts: int, dim: int, ffn_dim: int, *, activation: ActivationConfig):
        self.num_experts, self.activation = num_experts, activation
        self.w1 = PackedMatrices(num_experts, ffn_dim, dim)
        self.w3 = PackedMatrices(num_experts, ffn_dim, dim)
        self.w2 = PackedMatrices(num_experts, dim, ffn_dim)

    def matrices(self, dtype: Any = None) -> tuple[Any, Any, Any]:
        """Pairs of codes and scales; they are decoded to whatever type the product has."""
        w1, w3, w2 = ((w.packed[...], w.scale[...]) for w in (self.w1, self.w3, self.w2))
        return w1, w3, w2
