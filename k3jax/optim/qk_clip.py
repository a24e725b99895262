"""QK-Clip: shrink the query and key weights of an attention head whose logits grew too large."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def qk_clip(
    attention: dict, max_logit: Float[Array, "*layers H"], *, limit: float, qk_nope_dim: int
) -> dict:
    """Scale the heads of one gated MLA, or of a stack of them, whose logits exceeded the limit.

        gamma_h = min(1, tau / S_max^h)
        content channels of q and k: x sqrt(gamma_h);  shared query channels: x gamma_h

    so that every logit of head h shrinks by gamma_h (K2 report 2.1, applied to training.md §3): the
    shared key serves all heads and stays, so its query takes the whole factor. Values, gate, output
    and momentum stay too.

    Args:
        attention: parameters of GatedMLA, among them q_b_proj (or q_proj) [R, H, N + S] and
            kv_b_proj [C, H, N + V].
        max_logit: S_max, the largest logit of each head over the whole global batch, with the
            factor (N + S)**-0.5.
        limit: tau, 100 in K2.
        qk_nope_dim: N, content channels per head; they come first.

    Returns: the same dict with the scaled kernels; unchanged values where S_max <= tau.
    """
    gamma = jnp.where(max_logit > limit, limit / max_logit, 1.0)[..., None, :, None]
    root = jnp.sqrt(gamma)
    query = "q_b_proj" if "q_b_proj" in attention else "q_proj"
    factors = {query: (root, gamma), "kv_b_proj": (root, jnp.ones_like(gamma))}
    clipped = dict(attention)
    for name, (content, rest) in factors.items():
        kernel = attention[name]["kernel"]
        factor = jnp.where(jnp.arange(kernel.shape[-1]) < qk_nope_dim, content, rest)
        clipped[name] = {"kernel": (kernel * factor).astype(kernel.dtype)}
    return clipped
