"""Gated DeltaNet inside the KDA layer: one decay per head where KDA has one per key channel."""

from dataclasses import dataclass

from flax import nnx

from k3jax.layers.kda import KDAConfig, KimiDeltaAttention


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(KDAConfig):
    """KDA with a scalar decay: what the channel-wise decay is compared with. No further fields."""

    @property
    def decay_dim(self) -> int:
        return 1

    def build(
        self, width: int, *, rngs: nnx.Rngs, param_dtype: str, init_std: float
    ) -> "GatedDeltaNet":
        return GatedDeltaNet(self, width, rngs=rngs, param_dtype=param_dtype, init_std=init_std)


class GatedDeltaNet(KimiDeltaAttention):
    """S_t = (I - beta_t k_t k_t^T) exp(g_t) S_{t-1} + beta_t k_t v_t^T with a scalar g_t per head.

    It is the KDA recurrence whose channels agree, hence the same op with one decay per head.
    """

    def mix(self, q, k, v, g, beta, state, segment_ids):
        return super().mix(q, k, v, g[..., 0], beta, state, segment_ids)
