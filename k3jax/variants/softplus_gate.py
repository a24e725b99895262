"""Kimi Linear's decay as it was trained: unbounded softplus gate, rates that differ by head."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from k3jax.layers.kda import KDAConfig, KimiDeltaAttention
from k3jax.sharding.annotate import param


@dataclass(frozen=True, kw_only=True)
class SoftplusGateConfig(KDAConfig):
    """KDA with g = -rate softplus(z) and one trained rate per head, gate="softplus".

    K3 starts every head at rate 1; Kimi Linear draws rates, so that heads differ in their memory
    from the first step on.
    """

    rate_min: float  # smallest exp(A_log) at the start, nats per token and unit of softplus (1.0)
    rate_max: float  # largest one (16.0)

    def __post_init__(self):
        super().__post_init__()
        if self.gate != "softplus":
            raise ValueError(f"kda.gate={self.gate!r}: a softplus-gate layer needs gate='softplus'")
        if not 0 < self.rate_min <= self.rate_max < math.inf:
            raise ValueError(
                f"kda.rate_min={self.rate_min}, kda.rate_max={self.rate_max}: need "
                "0 < rate_min <= rate_max"
            )

    def build(
        self, width: int, *, rngs: nnx.Rngs, param_dtype: str, init_std: float
    ) -> "SoftplusGate":
        return SoftplusGate(self, width, rngs=rngs, param_dtype=param_dtype, init_std=init_std)


class SoftplusGate(KimiDeltaAttention):
    """KDA whose A_log starts at log U(rate_min, rate_max)."""

    def __init__(self, cfg: SoftplusGateConfig, width: int, *, rngs: nnx.Rngs, **kwargs):
        super().__init__(cfg, width, rngs=rngs, **kwargs)

        def init(key, shape, dtype):
            return jnp.log(jax.random.uniform(key, shape, dtype, cfg.rate_min, cfg.rate_max))

        self.A_log = param(rngs, init, (cfg.num_heads,), ("heads",), "float32")
