"""The op of Attention Residuals, and its two phases for inference."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.attention_residuals import chunked, pallas_tpu, triton_gpu

BACKENDS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (pallas_tpu.pallas_tpu, pallas_tpu.unsupported),
    "triton_gpu": (triton_gpu.triton_gpu, triton_gpu.unsupported),
    "chunked": (chunked.chunked, dispatch.always),
}


def attention_residuals(
    bank: Float[Array, "M B T D"],
    count: int | Int[Array, ""],
    prefix: Float[Array, "B T D"],
    query: Float[Array, " D"],
    norm: Float[Array, " D"],
    *,
    eps: float,
    out_norm: Float[Array, " D"] | None = None,
    out_eps: float | None = None,
    backend: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "M B T D"]]:
    """Softmax over depth, one distribution per token, and the norm that follows it.

        score_i = <rms(v_i) * norm, query>,   h = sum_i softmax(score)_i v_i     (K3 report, Eq. 8-9)
        x = h, or out_norm * rms(h)

    Args:
        bank: sources v_0 .. v_{M-1}; only rows below `count` take part, others may hold anything
            finite (in the TPU kernel, anything: they are not read).
        count: number of valid rows, 0 .. M.
        prefix: the last source, always valid.
        query: pseudo-query; zero gives the plain average.
        norm: weight of the key norm. Values are not normalised.
        eps: epsilon of the key norm.
        out_norm: weight of the RMS norm of the mixture; None leaves the mixture as it is.
        out_eps: its epsilon.
        backend: `pallas_tpu` or `chunked` must run; None takes the first that can.

    Returns: x in prefix's dtype, and the bank as it came. Who reads the bank from there on gets
        its cotangent handed from site to site, each adding its own in place, instead of a sum of
        one cotangent per site.
    Numerics: scores, softmax and the weighted sum are float32; the mixture is rounded before its norm.
    Cost: 6 D per source and token; nothing of the size of a source is kept for the backward pass.
    """
    if (out_norm is None) != (out_eps is None):
        raise ValueError(f"out_norm needs out_eps, and only then: out_eps is {out_eps}")
    run = dispatch.choose("attention_residuals", BACKENDS, backend, bank, count, prefix, out_norm)
    return run(bank, count, prefix, query, norm, eps, out_norm, out_eps)


class BankMix(NamedTuple):
    """What S sites read from one bank: softmax without the last source, not yet divided."""

    top: Float[Array, "S B T"]  # largest score, m_1; -inf for an empty bank
    total: Float[Array, "S B T"]  # sum of exp(score - top), l_1
    mixed: Float[Array, "S B T D"]  # sum of exp(score - top) v, o_1, float32


def mix_bank(
    bank: Float[Array, "M B T D"],
    count: int | Int[Array, ""],
    queries: Float[Array, "S D"],
    norms: Float[Array, "S D"],
    *,
    eps: float,
) -> BankMix:
    """Phase 1: all sites of a block over the bank, which stays as it is while the block runs.

        m_1 = max_i score_i,  l_1 = sum_i exp(score_i - m_1),  o_1 = sum_i exp(score_i - m_1) v_i
                                                                 (architecture 7.4)

    Args:
        bank, count, eps: as in `attention_residuals`.
        queries, norms: of the S sites.

    Numerics: float32. For inference: nothing here has a kernel or saves memory backward.
    """
    if isinstance(count, int):
        bank = bank[:count]
    keys = norms.astype(jnp.float32) * queries.astype(jnp.float32)
    v = bank.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(v * v, -1) + eps)
    score = scale * jnp.einsum("mbtd,sd->smbt", v, keys, precision="highest")
    valid = (jnp.arange(bank.shape[0]) < count)[:, None, None]
    score = jnp.where(valid, score, -jnp.inf)
    top = jnp.max(score, axis=1, initial=-jnp.inf)
    weights = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0)[:, None])
    mixed = jnp.einsum("smbt,mbtd->sbtd", weights, v, precision="highest")
    return BankMix(top, weights.sum(1), mixed)


def merge_prefix(
    banked: BankMix,
    prefix: Float[Array, "B T D"],
    query: Float[Array, " D"],
    norm: Float[Array, " D"],
    *,
    eps: float,
) -> Float[Array, "B T D"]:
    """Phase 2: one site's share of `mix_bank` (without the axis S) and the last source.

        h = (exp(m_1 - M) o_1 + exp(m_2 - M) p) / (exp(m_1 - M) l_1 + exp(m_2 - M)),  M = max(m_1, m_2)

    m_2 is the score of `prefix`, p. Arguments as in `attention_residuals`.
    """
    p = prefix.astype(jnp.float32)
    key = norm.astype(jnp.float32) * query.astype(jnp.float32)
    score = chunked.score(p, key, eps)
    top = jnp.maximum(banked.top, score)
    old, new = jnp.exp(banked.top - top), jnp.exp(score - top)
    h = old[..., None] * banked.mixed + new[..., None] * p
    return (h / (old * banked.total + new)[..., None]).astype(prefix.dtype)
