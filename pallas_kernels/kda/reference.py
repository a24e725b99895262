"""Kimi Delta Attention token by token: the definition all implementations must match."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels.kda.config import Config


def step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H K"],
    beta: Float[Array, "B H"],
    state: Float[Array, "B H K V"],
    erase: bool = True,
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One token: decay, then correct what the decayed memory predicts for k, then read.

        S'  = Diag(exp(g)) S
        S  <- S' + beta k (v - S'^T k)^T         (without erase: S' + beta k v^T)
        o   = S^T q                              (K3 report, Eq. 1)

    The error uses the memory after its decay and the output the memory after its update.
    """
    state = jnp.exp(g)[..., None] * state
    error = v - jnp.sum(k[..., None] * state, axis=-2) if erase else v
    state = state + (beta[..., None] * k)[..., None] * error[..., None, :]
    return jnp.sum(q[..., None] * state, axis=-2), state


def recurrent(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    state: Float[Array, "N H K V"],
    starts: Bool[Array, "B T"] | None,
    cu_seqlens: Int[Array, " offsets"] | None,
    cfg: Config,
) -> tuple[
    Float[Array, "B T H V"], Float[Array, "N H K V"], Float[Array, "B snapshots H K V"] | None
]:
    """KDA by the recurrence, in float32 (float64 if the inputs are).

    Args:
        q, k, v, g, beta, state: as in `api.kda`, with padding already made neutral (zeros).
        starts: True where a document begins inside a row: the memory is emptied before that token.
        cu_seqlens: offsets of documents packed into the only row; state n enters document n.
        cfg: `erase` and `snapshot_every`; how the work is cut up does not concern this form.

    Returns: outputs, one memory per row (per document with `cu_seqlens`), and the memories after
    every `snapshot_every` tokens of a row.
    Cost: O(T K V) per head and T sequential steps; one state per token is kept for the backward
    pass or for snapshots. With `cu_seqlens`, every document costs a whole row.
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    inputs = [x.astype(wide) for x in (q, k, v, g, beta)]
    if cu_seqlens is not None:
        # Document n becomes a row of its own in which the tokens of all others are padding.
        token = jnp.arange(q.shape[1])
        mine = (cu_seqlens[:-1, None] <= token) & (token < cu_seqlens[1:, None])
        inputs = [jnp.where(mine.reshape(*mine.shape, *[1] * (x.ndim - 2)), x, 0) for x in inputs]
    if starts is None:
        starts = jnp.zeros(inputs[0].shape[:2], bool)

    def body(state, token):
        start, q, k, v, g, beta = token
        state = jnp.where(start[:, None, None, None], 0, state)
        o, state = step(q, k, v, g, beta, state, cfg.erase)
        return state, (o, state)

    time_first = [jnp.moveaxis(x, 1, 0) for x in (starts, *inputs)]
    state, (o, states) = jax.lax.scan(body, state.astype(wide), time_first)
    o, every = jnp.moveaxis(o, 0, 1), cfg.snapshot_every
    snapshots = None if every is None else jnp.moveaxis(states[every - 1 :: every], 0, 1)
    return (o if cu_seqlens is None else o.sum(0, keepdims=True)), state, snapshots
