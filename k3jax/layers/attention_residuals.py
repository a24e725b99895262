"""Attention Residuals: a softmax mix over earlier depth in place of the residual sum (K3 report, Eq. 8-10).

State carried through depth: `bank` [M, B, T, D], of which the first `count` rows are written, and `prefix` [B, T, D],
the running sum since the last push. A *site* is one mix; it feeds one sub-layer and is never added to the stream.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.layers.norms import RMSNorm
from k3jax.pallas_kernels.attention_residuals import attention_residuals
from k3jax.pallas_kernels.attention_residuals.chunked import mix as mix
from k3jax.sharding.annotate import param


@dataclass(frozen=True, kw_only=True)
class AttnResConfig:
    kind: Literal["none", "block", "full"]  # ordinary residuals; sources are blocks; sub-layers
    block_size: int | None  # transformer layers per block; block only

    def __post_init__(self):
        if self.kind not in ("none", "block", "full"):
            raise ValueError(f"attn_res.kind is {self.kind!r}; use none, block or full")
        if (self.kind == "block") != (self.block_size is not None):
            raise ValueError(
                f"attn_res.kind={self.kind} with block_size={self.block_size}: "
                "give block_size exactly when kind is block"
            )
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"attn_res.block_size is {self.block_size}; it must be at least 1")

    def num_rows(self, num_layers: int) -> int:
        """Rows that the bank holds after the last layer (the embedding's included)."""
        if self.block_size is not None:
            return -(-num_layers // self.block_size)
        return 2 * num_layers if self.kind == "full" else 0

    def before_attention(self, index):
        """(rows in the bank, whether `prefix` is pushed after the mix) at layer `index`, int or traced."""
        if self.block_size is not None:
            return -(-index // self.block_size), index % self.block_size == 0
        return 2 * index, True

    def before_mixer(self, index):
        """The same for the site in front of the channel mixer."""
        if self.block_size is not None:
            return index // self.block_size + 1, False
        return 2 * index + 1, True


def push(
    bank: Float[Array, "M B T D"],
    count: int | Int[Array, ""],
    prefix: Float[Array, "B T D"],
    when: bool | Array,
    *,
    written: bool = False,
) -> tuple[Float[Array, "M B T D"], Float[Array, "B T D"]]:
    """Append `prefix` to the bank at row `count` and start a new sum, if `when` holds.

    Only one row is selected and written, so a traced `when` costs one row and not a copy of the bank.
    `written`: the bank holds this row already, as in a recomputation; then nothing is written, and the gradient is
    the one of a push.
    """
    if when is False:
        return bank, prefix
    if written:
        return _push_written(bank, count, prefix, when)
    if when is True:
        return jax.lax.dynamic_update_index_in_dim(bank, prefix, count, 0), jnp.zeros_like(prefix)
    row = jnp.where(when, prefix, jax.lax.dynamic_index_in_dim(bank, count, 0, keepdims=False))
    bank = jax.lax.dynamic_update_index_in_dim(bank, row, count, 0)
    return bank, jnp.where(when, jnp.zeros_like(prefix), prefix)


@jax.custom_vjp
def _push_written(bank, count, prefix, when):
    return bank, jnp.where(when, jnp.zeros_like(prefix), prefix)


def _push_written_fwd(bank, count, prefix, when):
    return _push_written(bank, count, prefix, when), (count, when)


def _push_written_bwd(saved, cotangents):
    count, when = saved
    d_bank, d_prefix = cotangents
    row = jax.lax.dynamic_index_in_dim(d_bank, count, 0, keepdims=False)
    kept = jnp.where(when, jnp.zeros_like(row), row)
    d_bank = jax.lax.dynamic_update_index_in_dim(d_bank, kept, count, 0)
    return d_bank, None, jnp.where(when, row, d_prefix), None


_push_written.defvjp(_push_written_fwd, _push_written_bwd)


class AttnResSite(nnx.Module):
    """One mix: the key norm and the pseudo-query, which starts at zero (AttnRes report, section 5)."""

    def __init__(self, width: int, *, eps: float, rngs: nnx.Rngs, param_dtype: str):
        self.norm = RMSNorm(width, eps=eps, rngs=rngs, param_dtype=param_dtype)
        self.proj = param(rngs, nnx.initializers.zeros, (width,), ("embed",), param_dtype)

    def __call__(
        self,
        bank: Float[Array, "M B T D"],
        count: int | Int[Array, ""],
        prefix: Float[Array, "B T D"],
    ) -> Float[Array, "B T D"]:
        """The mixture alone."""
        return self._read(bank, count, prefix)[0]

    def normed(
        self,
        bank: Float[Array, "M B T D"],
        count: int | Int[Array, ""],
        prefix: Float[Array, "B T D"],
        norm: RMSNorm,
    ) -> tuple[Float[Array, "B T D"], Float[Array, "M B T D"]]:
        """Input of a sub-layer, norm(mixture), and the bank for the next reader.

        Computed again in the backward pass, which keeps what plain residuals keep (KF-070).
        """
        return self._read(bank, count, prefix, out_norm=norm.weight[...], out_eps=norm.eps)

    def _read(self, bank, count, prefix, **after):
        with jax.named_scope("attn_res"):
            return attention_residuals(
                bank,
                count,
                prefix,
                self.proj[...],
                self.norm.weight[...],
                eps=self.norm.eps,
                **after,
            )
