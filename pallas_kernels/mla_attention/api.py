"""The attention of gated MLA: one entry point, checked arguments, several backends behind it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.mla_attention import chunked, pallas_tpu, reference, triton_gpu

BACKENDS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.pallas_tpu, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.triton_gpu, triton_gpu.unsupported),
    "chunked": (chunked.chunked, dispatch.always),
    "reference": (reference.attention, dispatch.always),
}


def mla_attention(
    q: Float[Array, "B T H Q"],
    k: Float[Array, "B T H N"],
    k_shared: Float[Array, "B T R"],
    v: Float[Array, "B T H V"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Causal softmax attention inside documents, with keys partly shared by all heads.

        o_t = sum_s p_ts v_s,   p_t = softmax_s(scale q_t . [k_s | k_shared_s])
        over tokens s <= t of the same document               (architecture 6.1)

    Args:
        q: queries, Q = N + R.
        k: the keys' channels of each head.
        k_shared: the channels that all heads share.
        v: values; their width may differ from Q.
        scale: factor on q . k, Q**-0.5 in MLA.
        segment_ids: document of each token, whose tokens are neighbours; different between those
            of a row, 0 for padding; None: one document per row. Content at padding may be
            anything, NaN included, and gets no gradient.
        backend: implementation; None takes the first that fits and logs it.

    Returns: outputs in float32 (training keeps them so, K3 report 2.1.2), exactly 0 at padding;
    and the largest scaled logit of each head over all pairs that may attend, without gradient,
    0 if there is none.
    Numerics: float32 logits, softmax and accumulation; p is rounded to v's dtype.
    Cost: O(T^2 (Q + V)) per head.
    """
    B, T, H, Q = q.shape
    N, R = k.shape[-1], k_shared.shape[-1]
    if Q != N + R:
        raise ValueError(f"mla_attention: q has {Q} channels, k and k_shared {N} + {R}")
    if k.shape[:3] != (B, T, H) or v.shape[:3] != (B, T, H) or k_shared.shape[:2] != (B, T):
        raise ValueError(
            f"mla_attention: q {q.shape}, k {k.shape}, k_shared {k_shared.shape} and v {v.shape} "
            "differ in rows, tokens or heads"
        )
    if segment_ids is not None:
        if segment_ids.shape != (B, T):
            raise ValueError(
                f"mla_attention: segment_ids {segment_ids.shape} for rows of {(B, T)} tokens"
            )
        # A select and not a mask on the results: 0 * NaN is NaN.
        real = segment_ids > 0
        q, k, v = (jnp.where(real[..., None, None], x, 0) for x in (q, k, v))
        k_shared = jnp.where(real[..., None], k_shared, 0)
    if q.size == 0 or v.size == 0:
        return jnp.zeros(v.shape, jnp.float32), jnp.zeros(H, jnp.float32)
    run = dispatch.choose("mla_attention", BACKENDS, backend, q, k, k_shared, v)
    return run(q, k, k_shared, v, segment_ids, scale)
