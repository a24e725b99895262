"""Learning rate over a run: linear warm-up, then cosine decay to a floor."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def learning_rate(
    step: Int[Array, ""], *, num_steps: int, peak: float, final: float, warmup_fraction: float
) -> Float[Array, ""]:
    """Learning rate of one step, float32.

        t < N_w:  eta = eta_max (t + 1) / N_w
        else:     eta = eta_min + (eta_max - eta_min) (1 + cos(pi (t - N_w) / (N - N_w))) / 2
        N_w = ceil(warmup_fraction N)                                             (training.md §1)

    Args:
        step: t, 0 for the first step; at N and later the floor is returned.
        num_steps: N, steps of the whole run.
        peak: eta_max.
        final: eta_min, reached at t = N, one step after the last.
        warmup_fraction: share of the run spent warming up, 0.01 in K3.
    """
    # 0.07 * 100 is 7.000000000000001 in binary: without the rounding its ceiling would be 8.
    warmup = math.ceil(round(warmup_fraction * num_steps, 6))
    t = step.astype(jnp.float32)
    rising = peak * (t + 1) / max(warmup, 1)
    progress = jnp.clip((t - warmup) / max(num_steps - warmup, 1), 0, 1)
    falling = final + 0.5 * (peak - final) * (1 + jnp.cos(jnp.pi * progress))
    return jnp.where(t < warmup, rising, falling)
