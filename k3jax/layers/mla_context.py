"""Attention of gated MLA over rows whose tokens are split over the mesh axis `context`.

What moves is the latent row [c | k_r], which all heads share: 576 values per token in K3. A row of
1,048,576 tokens is 1.21 GB of them in bfloat16, gathered once per layer and pass, against 15.0 GB of
activations 7168 wide and 51.5 GB of keys and values of 96 heads (128 + 128 channels each). Those are made
from the latent a chunk at a time at most, half a window, and never exist for a row.

So that ranks do equal work they first exchange half of their window (`sharding.context_balance`). The
layer exchanges its input x and exchanges its output back, all else in it being token-local: 7168 wide
each, against 18432 for the queries of all heads and 12288 in float32 for their outputs. (With heads
split over more than 3 devices the latter two would be the fewer bytes; all are small beside the latent: at
64 ranks x is 0.12 GB, half a window of 16,384 tokens.)

What queries make of their keys is `pallas_kernels.mla_attention.pairs`: by the TPU kernels, a chunk at a
time, or in plain JAX by blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.mla_attention import pairs
from k3jax.sharding import context_balance
from k3jax.sharding.annotate import axis_index, axis_size, pmax

BLOCK = 512  # queries, and keys, whose logits exist at once where there is no kernel
F32 = jnp.float32


def context_attention(
    q: Float[Array, "B T H Q"],
    latent: Float[Array, "B T L"],
    kernel: Float[Array, "C H E"],
    segments: Int[Array, "B N T_half"],
    *,
    scale: float,
    backend: str | None = None,
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
        backend: of `pairs`, what computes pairs of blocks; None takes the first that fits.

    Returns: outputs in float32, exactly 0 at padding; and the largest scaled logit of each head over
    all pairs of all ranks that may attend, without gradient, 0 if there is none.
    Numerics: float32 logits, softmax and accumulation; p is rounded to the latent's dtype, d_latent
    and the kernel's gradient are summed in float32 and rounded once.
    Cost: one gather of the latent, forward and backward, and one scattered sum of its gradient in
    float32; 2 N_ranks + 1 pairs of chunks on each rank. Blocks without a common document are not
    visited. Keeps q, latent, o and two numbers per query and head for the backward pass.
    """
    N = q.shape[-1] - (latent.shape[-1] - kernel.shape[0])
    keys = jax.eval_shape(
        lambda c_kr, w: _expand(c_kr, *jnp.split(w, [N], axis=-1)), latent, kernel
    )
    way = pairs.choose(q, *keys, backend=backend)
    return _attend(way, scale, q.shape[1] // 2 if way.whole else BLOCK, q, latent, kernel, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(way, scale, block, q, latent, kernel, segments):
    return _forward(way, scale, block, q, latent, kernel, segments)[0]


def _forward(way, scale, block, q, latent, kernel, segments):
    at = _Blocks(scale, block, q, latent, kernel, segments)
    row = context_balance.gather(at.split(latent, 2))

    def half(_, xs):
        q, chunk = xs
        return None, way.forward(q, at.row(row, chunk))

    _, (o, m, total, top) = jax.lax.scan(half, None, (at.halves(q), at.held))
    top = pmax(top.max(0), "context")
    o = at.join(o.reshape(-1, *o.shape[2:]))
    return (o, jnp.where(jnp.isfinite(top), top, 0)), (q, latent, kernel, segments, o, m, total)


def _backward(way, scale, block, residuals, cotangents):
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

    w_k, w_v = (w.reshape(at.rank, -1) for w in (at.w_k, at.w_v))

    def add(carry, j, dk_n, dk_shared, dv):
        """Gradients of the latent and of both parts of the kernel, with those of block j of keys."""
        d_row, d_k, d_v = carry
        place = at.place(j)
        c = row[place][..., : at.rank]
        # Heads and their channels as one dimension, as kernels write them: TPUs copy for two.
        dk_n, dv = (x.reshape(*x.shape[:2], -1) for x in (dk_n, dv))
        d_c = _einsum("bse,ce->bsc", dk_n, w_k) + _einsum("bse,ce->bsc", dv, w_v)
        d_latent = jnp.concatenate([d_c, dk_shared], axis=-1)
        d_row = jax.lax.dynamic_update_index_in_dim(d_row, d_row[place] + d_latent, place, 0)
        d_k += _einsum("bsc,bse->ce", c, dk_n)
        return d_row, d_k, d_v + _einsum("bsc,bse->ce", c, dv)

    def half(carry, xs):
        *queries, chunk = xs
        dq, carry = way.backward(*queries, at.row(row, chunk), add, carry)
        return carry, dq

    carry = tuple(jnp.zeros(x.shape, F32) for x in (row, w_k, w_v))
    halves = (at.halves(q), d_o, m, delta, at.held)
    (d_row, *d_kernel), dq = jax.lax.scan(half, carry, halves)
    dq = at.join(dq.reshape(-1, *dq.shape[2:]))
    d_latent = at.join(context_balance.scatter_sum(d_row))
    d_kernel = [d.reshape(at.rank, kernel.shape[1], -1) for d in d_kernel]
    d_kernel = jnp.concatenate(d_kernel, axis=-1)
    return dq.astype(q.dtype), d_latent.astype(dtype), d_kernel.astype(kernel.dtype), None


_attend.defvjp(_forward, _backward)


class _Blocks:
    """The row as blocks of equal size: which there are, where they lie, and which pairs count."""

    def __init__(self, scale, block, q, latent, kernel, segments):
        self.chunk = q.shape[1] // 2  # tokens
        self.n = -(-self.chunk // block)  # blocks of a chunk
        self.size = -(-self.chunk // self.n)  # tokens of a block, the last ones padded
        self.scale, self.rank = scale, kernel.shape[0]
        N = q.shape[-1] - (latent.shape[-1] - self.rank)
        self.w_k, self.w_v = jnp.split(kernel, [N], axis=-1)
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

    def row(self, gathered, chunk):
        """What the queries of a chunk meet, of the gathered latents."""

        def keys(j):
            return _expand(gathered[self.place(j)], self.w_k, self.w_v)

        return pairs.Row(keys, self.scale, self.segments, chunk * self.n, self.visits(chunk))

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


def _expand(c_kr, w_k, w_v):
    """Of latents [B S L]: keys of each head [B S H N], the channels that heads share, and values."""
    c, k_shared = jnp.split(c_kr, [w_k.shape[0]], axis=-1)
    return jnp.einsum("bsc,che->bshe", c, w_k), k_shared, jnp.einsum("bsc,che->bshe", c, w_v)


def _einsum(equation: str, *arrays):
    return jnp.einsum(equation, *arrays, preferred_element_type=F32)
