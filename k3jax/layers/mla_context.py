"""Attention of gated MLA over rows whose tokens are split over the mesh axis `context`.

What moves is the latent row [c | k_r], which all heads share: 576 values per token in K3. A row of
1,048,576 tokens is 1.21 GB of them in bfloat16, gathered once per layer and pass, against 15.0 GB of
activations 7168 wide and 51.5 GB of keys and values of 96 heads (128 + 128 channels each). Those are made
from the latent a block at a time and never exist for a row.

So that ranks do equal work they first exchange half of their window (`sharding.context_balance`). The
layer exchanges its input x and exchanges its output back, all else in it being token-local: 7168 wide
each, against 18432 for the queries of all heads and 12288 in float32 for their outputs. (With heads
split over more than 3 devices the latter two would be the fewer bytes; all are small beside the latent: at
64 ranks x is 0.12 GB, half a window of 16,384 tokens.)

Plain JAX on every platform: the TPU kernels of `pallas_kernels.mla_attention` know whole rows only.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.sharding import context_balance
from k3jax.sharding.annotate import axis_index, axis_size, pmax

BLOCK = 512  # queries, and keys, whose logits exist at once
F32 = jnp.float32


def context_attention(
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B T L"],
    kernel: Float[Array, "C H E"],
    segments: Int[Array, "B N T_half"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Causal softmax attention inside documents, over the row that all ranks of `context` hold.

        [k_n | v]_s = W c_s,   k_s = [k_n | k_r]_s,   o_t = sum_s softmax_s(scale q_t . k_s) v_s
        over tokens s <= t of the row, of the same document        (architecture 6.1, kcp 9)

    Args:
        q: queries of the two chunks that `context_balance.held_chunks` names, one after the other.
        latent: rows [c | k_r] of the same tokens, L = C + shared channels.
        kernel: W, from the latent to each head's E = key channels of its own + V.
        segments: document of each token of the whole row, by chunks in their order; equal ids are
            one run, 0 is padding, whose q and latent must be finite.
        scale: factor on q . k.

    Returns: outputs in float32, exactly 0 at padding; and the largest scaled logit of each head over
    all pairs of all ranks that may attend, without gradient, 0 if there is none.
    Numerics: float32 logits, softmax and accumulation; p is rounded to the latent's dtype, d_latent
    and the kernel's gradient are summed in float32 and rounded once.
    Cost: one gather of the latent, forward and backward, and one scattered sum of its gradient in
    float32; 2 N_ranks + 1 pairs of chunks on each rank. Blocks without a common document are not
    visited. Keeps q, latent, o and two numbers per query and head for the backward pass.
    """
    return _attend(scale, BLOCK, q, latent, kernel, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(scale, block, q, latent, kernel, segments):
    return _forward(scale, block, q, latent, kernel, segments)[0]


def _forward(scale, block, q, latent, kernel, segments):
    at = _Blocks(scale, block, q, latent, kernel, segments)
    B, T, H, _ = q.shape
    row = context_balance.gather(at.split(latent, 2))

    def half(_, xs):
        q, chunk = xs
        stats = (at.n, B, H, at.size)
        state = (
            jnp.full(stats, -jnp.inf, F32),
            jnp.zeros(stats, F32),
            jnp.zeros((*stats, at.V), F32),
        )
        first, end, first_query, end_query = at.visits(chunk)

        def keys(j, state):
            k, v = at.expand(row[at.place(j)])

            def queries(i, state):
                m, total, o = (x[i] for x in state)
                s = at.logits(q[i], k, chunk * at.n + i, j)
                m_new = jnp.maximum(m, s.max(-1))
                reference = jnp.where(jnp.isfinite(m_new), m_new, 0)
                p, decay = jnp.exp(s - reference[..., None]), jnp.exp(m - reference)
                o = o * decay[..., None] + _einsum("bhts,bhsv->bhtv", p.astype(v.dtype), v)
                update = (m_new, total * decay + p.sum(-1), o)
                return tuple(_replace(x, i, new) for x, new in zip(state, update, strict=True))

            return jax.lax.fori_loop(first_query[j], end_query[j], queries, state)

        m, total, o = jax.lax.fori_loop(first, end, keys, state)
        total = jnp.where(total == 0, 1, total)
        return None, (m, total, jnp.moveaxis(o / total[..., None], 2, 3))

    _, (m, total, o) = jax.lax.scan(half, None, (at.halves(q), at.held))
    top = pmax(m.max((0, 1, 2, 4)), "context")
    m, top = (jnp.where(jnp.isfinite(x), x, 0) for x in (m, top))
    o = at.join(o.reshape(-1, *o.shape[2:]))
    return (o, top), (q, latent, kernel, segments, o, m, total)


def _backward(scale, block, residuals, cotangents):
    # Behind the barrier, or the compiler keeps the forward pass's gathered row for this one.
    (q, latent, kernel, segments, o, m, total), d_o = jax.lax.optimization_barrier(
        (residuals, cotangents[0])
    )
    at = _Blocks(scale, block, q, latent, kernel, segments)
    dtype = latent.dtype
    row = context_balance.gather(at.split(latent, 2))
    # The sum that makes p a softmax divides d_o, and not its logarithm the exponent: beside a logit
    # of 1e4 float32 keeps three digits of that. delta is of the rounded d_o, as dp is.
    d_o = (at.halves(d_o) / jnp.moveaxis(total, 3, 4)[..., None]).astype(dtype)
    delta = jnp.moveaxis((at.halves(o) * d_o.astype(F32)).sum(-1), 3, 4)  # 2 n B H t

    def half(carry, xs):
        q, d_o, m, delta, chunk = xs
        first, end, first_query, end_query = at.visits(chunk)

        def keys(j, carry):
            dq, d_row, d_kernel = carry
            c_kr = row[at.place(j)]
            k, v = at.expand(c_kr)

            def queries(i, carry):
                dq, dk, dv = carry
                s = at.logits(q[i], k, chunk * at.n + i, j)
                p = jnp.exp(s - m[i][..., None])
                dp = _einsum("bthv,bhsv->bhts", d_o[i], v)
                ds = (scale * p * (dp - delta[i][..., None])).astype(dtype)
                dv += _einsum("bhts,bthv->bhsv", p.astype(dtype), d_o[i])
                dk += _einsum("bhts,bthq->bhsq", ds, q[i])
                return _replace(dq, i, dq[i] + _einsum("bhts,bhsq->bthq", ds, k)), dk, dv

            zeros = (jnp.zeros(k.shape, F32), jnp.zeros(v.shape, F32))
            dq, dk, dv = jax.lax.fori_loop(first_query[j], end_query[j], queries, (dq, *zeros))
            d_kv = jnp.concatenate([dk[..., : at.N], dv], axis=-1).astype(dtype)
            d_c = _einsum("bhse,che->bsc", d_kv, kernel)
            d_kernel += _einsum("bsc,bhse->che", c_kr[..., : at.rank], d_kv)
            d_latent = jnp.concatenate([d_c, dk[..., at.N :].sum(1)], axis=-1)
            place = at.place(j)
            return dq, _replace(d_row, place, d_row[place] + d_latent), d_kernel

        carry = (jnp.zeros(q.shape, F32), *carry)
        dq, *carry = jax.lax.fori_loop(first, end, keys, carry)
        return tuple(carry), dq

    carry = (jnp.zeros(row.shape, F32), jnp.zeros(kernel.shape, F32))
    halves = (at.halves(q), d_o, m, delta, at.held)
    (d_row, d_kernel), dq = jax.lax.scan(half, carry, halves)
    dq = at.join(dq.reshape(-1, *dq.shape[2:]))
    d_latent = at.join(context_balance.scatter_sum(d_row))
    return dq.astype(q.dtype), d_latent.astype(dtype), d_kernel.astype(kernel.dtype), None


_attend.defvjp(_forward, _backward)


class _Blocks:
    """The row as blocks of equal size: which there are, where they lie, and which pairs count."""

    def __init__(self, scale, block, q, latent, kernel, segments):
        self.scale, self.kernel = scale, kernel
        self.chunk = q.shape[1] // 2  # tokens
        self.n = -(-self.chunk // block)  # blocks of a chunk
        self.size = -(-self.chunk // self.n)  # tokens of a block, the last ones padded
        self.rank = kernel.shape[0]
        self.N = q.shape[-1] - (latent.shape[-1] - self.rank)
        self.V = kernel.shape[-1] - self.N
        self.ranks = axis_size("context")
        self.held = jnp.stack(context_balance.held_chunks(axis_index("context"), self.ranks))
        self.segments = self.split(segments.reshape(len(segments), -1), 2 * self.ranks)

    def split(self, x, chunks: int):
        """[B chunks*C ...] as [chunks*n B t ...], zeros behind the tokens of a chunk."""
        x = x.reshape(x.shape[0], chunks, self.chunk, *x.shape[2:])
        padding = self.n * self.size - self.chunk
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 3))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks * self.n, self.size, *x.shape[3:]), 1, 0)

    def halves(self, x):
        """Tokens of this rank as [2 n B t ...]."""
        x = self.split(x, 2)
        return x.reshape(2, self.n, *x.shape[1:])

    def join(self, x):
        """The inverse of `split` for the tokens of this rank."""
        x = jnp.moveaxis(x, 0, 1).reshape(x.shape[1], 2, self.n * self.size, *x.shape[3:])
        return x[:, :, : self.chunk].reshape(x.shape[0], 2 * self.chunk, *x.shape[3:])

    def place(self, j):
        """Index of block j of the row among the gathered ones."""
        return context_balance.place_of(j // self.n, self.ranks) * self.n + j % self.n

    def expand(self, c_kr):
        """Keys and values of each head, [B H S ...], of one block of the latent."""
        c, k_r = jnp.split(c_kr, [self.rank], axis=-1)
        k_n, v = jnp.split(jnp.einsum("bsc,che->bhse", c, self.kernel), [self.N], axis=-1)
        k_r = jnp.broadcast_to(k_r[:, None], (*k_n.shape[:3], k_r.shape[-1]))
        return jnp.concatenate([k_n, k_r], axis=-1), v

    def logits(self, q, k, i, j):
        """Logits [B H T S] of block i of queries and block j of keys, -inf where masked."""
        s = _einsum("bthq,bhsq->bhts", q, k) * self.scale
        token = jnp.arange(self.size)
        mine, other = self.segments[i][:, :, None], self.segments[j][:, None]
        mask = (
            (mine == other) & (mine > 0) & (j * self.size + token <= i * self.size + token[:, None])
        )
        return jnp.where(mask[:, None], s, -jnp.inf)

    def visits(self, chunk):
        """Which pairs of blocks the queries of a chunk need: the keys' first block and the end of
        them, and for each block of keys the first block of queries in the chunk and the end."""
        real = self.segments > 0
        low = jnp.where(real, self.segments, jnp.iinfo(jnp.int32).max).min(-1)
        high = self.segments.max(-1)  # blocks B
        index = jnp.arange(len(low))
        mine = chunk * self.n + jnp.arange(self.n)
        meet = (low[mine][:, None] <= high) & (low <= high[mine][:, None])
        meet = meet.any(-1) & (index <= mine[:, None])  # n blocks
        used = meet.any(0)
        ends = jnp.where(used, self.n - meet[::-1].argmax(0), 0)
        return used.argmax(), jnp.where(used, index + 1, 0).max(), meet.argmax(0), ends


def _einsum(equation: str, *arrays):
    return jnp.einsum(equation, *arrays, preferred_element_type=F32)


def _replace(x, i, value):
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)
