"""Causal attention of one chunk of a row, to keys that are made block by block: none exists for a row.

    k_s = [k_n | k_shared]_s,   o_t = sum_s softmax_s(scale q_t . k_s) v_s
    over tokens s <= t of the row, of the same document

The blocks of a row are alike. A chunk is n of them; its queries meet its own and those before it.
Where a row is split over devices, each has some chunks of queries, and what keys and values are made from.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels.mla_attention import pallas_tpu, tpu_backward, tpu_forward, tpu_pairs
from k3jax.pallas_kernels.mla_attention.tpu_forward import HEADROOM, TOP, TOTAL, M, Sizes
from k3jax.pallas_kernels.mla_attention.tpu_grid import F32, LOG2E, block_size, round_up


class Row(NamedTuple):
    """What the queries of a chunk meet."""

    keys: Callable[[Any], tuple[Array, Array, Array]]  # block j: k_n [B S H N], k_shared [B S R], v
    scale: float  # factor on q . k
    segments: Int[Array, "blocks B S"]  # document of each token of the row, 0 for padding
    chunk: Any  # index of the first block of queries
    # Blocks of keys: the first that is needed, and the end of them; and for each its first block of
    # queries in the chunk and the end of those.
    visits: tuple[Array, Array, Int[Array, " blocks"], Int[Array, " blocks"]]


class Pairs(Protocol):
    """A backend. Both methods take and give queries by blocks, [n B T H ...].

    `forward`: o in float32, 0 at padding; two numbers [n B H T] per query for `backward`: a
        reference point and the sum of the exponentials of logits beside it, 1 at padding; the
        largest scaled logit of each head, -inf if there is none.
    `backward`: dq in float32, and `carry` after `add(carry, j, dk_n, dk_shared, dv)` for each
        block of keys, all of it from the queries of this chunk; dk_shared in float32. d_o is divided
        by the sum, and delta is d_o . o.
    """

    whole: bool  # a chunk is one block, else n of a size of which all logits may exist at once

    @staticmethod
    def forward(q: Array, row: Row) -> tuple[Array, Array, Array, Array]: ...

    @staticmethod
    def backward(
        q: Array, d_o: Array, m: Array, delta: Array, row: Row, add: Callable, carry: Any
    ) -> tuple[Array, Any]: ...


def choose(q: Any, k: Any, k_shared: Any, v: Any, *, backend: str | None = None) -> type[Pairs]:
    """The backend for queries and keys of these widths and dtypes; None takes the first that fits and logs it."""
    way = dispatch.choose("mla_pairs", BACKENDS, backend, q, k, k_shared, v)
    return cast(type[Pairs], way)


class Blocks:
    """Pairs of blocks in plain JAX, with a running maximum: any platform.

    Numerics: float32 logits, softmax and accumulation; p is rounded to v's dtype.
    """

    whole = False

    @staticmethod
    def forward(q: Float[Array, "n B T H Q"], row: Row):
        n, B, T, H, _ = q.shape
        first, end, first_query, end_query = row.visits
        V = jax.eval_shape(row.keys, 0)[2].shape[-1]

        def of_keys(j, state):
            k_n, k_shared, v = row.keys(j)
            k = _whole(k_n, k_shared)

            def of_queries(i, state):
                m, total, o = (x[i] for x in state)
                s = _logits(q[i], k, row, i, j)
                m_new = jnp.maximum(m, s.max(-1))
                reference = jnp.where(jnp.isfinite(m_new), m_new, 0)
                p, decay = jnp.exp(s - reference[..., None]), jnp.exp(m - reference)
                o = o * decay[..., None] + _einsum("bhts,bshv->bhtv", p.astype(v.dtype), v)
                update = (m_new, total * decay + p.sum(-1), o)
                return tuple(_replace(x, i, new) for x, new in zip(state, update, strict=True))

            return jax.lax.fori_loop(first_query[j], end_query[j], of_queries, state)

        state = (
            jnp.full((n, B, H, T), -jnp.inf, F32),
            jnp.zeros((n, B, H, T), F32),
            jnp.zeros((n, B, H, T, V), F32),
        )
        m, total, o = jax.lax.fori_loop(first, end, of_keys, state)
        total = jnp.where(total == 0, 1, total)
        o = jnp.moveaxis(o / total[..., None], 2, 3)
        return o, jnp.where(jnp.isfinite(m), m, 0), total, m.max((0, 1, 3))

    @staticmethod
    def backward(q, d_o, m, delta, row: Row, add, carry):
        first, end, first_query, end_query = row.visits

        def of_keys(j, state):
            dq, carry = state
            k_n, k_shared, v = row.keys(j)
            k, N = _whole(k_n, k_shared), k_n.shape[-1]

            def of_queries(i, state):
                dq, dk, dv = state
                s = _logits(q[i], k, row, i, j)
                p = jnp.exp(s - m[i][..., None])
                dp = _einsum("bthv,bshv->bhts", d_o[i], v)
                ds = (row.scale * p * (dp - delta[i][..., None])).astype(q.dtype)
                dv += _einsum("bhts,bthv->bshv", p.astype(v.dtype), d_o[i])
                dk += _einsum("bhts,bthq->bshq", ds, q[i])
                return _replace(dq, i, dq[i] + _einsum("bhts,bshq->bthq", ds, k)), dk, dv

            zeros = (jnp.zeros(k.shape, F32), jnp.zeros(v.shape, F32))
            dq, dk, dv = jax.lax.fori_loop(first_query[j], end_query[j], of_queries, (dq, *zeros))
            dk_n, dk_shared = dk[..., :N].astype(k.dtype), dk[..., N:].sum(2)
            return dq, add(carry, j, dk_n, dk_shared, dv.astype(v.dtype))

        return jax.lax.fori_loop(first, end, of_keys, (jnp.zeros(q.shape, F32), carry))


def _logits(q, k, row: Row, i, j):
    """Logits [B H T S] of block i of the queries and block j of keys, -inf where masked."""
    s = _einsum("bthq,bshq->bhts", q, k) * row.scale
    size = q.shape[1]
    i, token = row.chunk + i, jnp.arange(size)
    mine, other = row.segments[i][:, :, None], row.segments[j][:, None]
    mask = (mine == other) & (mine > 0) & (j * size + token <= i * size + token[:, None])
    return jnp.where(mask[:, None], s, -jnp.inf)


def _whole(k_n, k_shared):
    """Keys of each head, with the channels that all share."""
    k_shared = jnp.broadcast_to(k_shared[:, :, None], (*k_n.shape[:3], k_shared.shape[-1]))
    return jnp.concatenate([k_n, k_shared], axis=-1)


def _einsum(equation: str, *arrays):
    return jnp.einsum(equation, *arrays, preferred_element_type=F32)


def _replace(x, i, value):
    return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)


class Kernels:
    """Pairs of chunks by the TPU kernels; a chunk is one block of the row.

    The chunk itself, which holds each query's own token, is a row of `mla_attention` and gives the
    reference points; to its results the chunks before are added. Where a logit exceeds its reference by
    too much, all is done again with a running maximum.

    Numerics: as `pallas_tpu.pallas_tpu`; o is multiplied and divided by its sum once per chunk of keys.
    """

    whole = True

    @staticmethod
    def forward(q: Float[Array, "1 B T H Q"], row: Row):
        T, at = q.shape[2], _Chunk(q, row)

        def run(exact):
            keys, ids = at.keys(row.chunk)
            o, stats = tpu_forward.forward(at.sizes, at.qT, *keys, ids, exact=exact)

            def add(j, before):
                keys, k_ids = at.keys(j)
                return tpu_pairs.forward(at.sizes, at.qT, *keys, ids, k_ids, before, exact=exact)

            return jax.lax.fori_loop(*at.before, add, (_flat(o), stats))

        def too_high(state):
            exact, (_, stats) = state
            return ~exact & jnp.any(stats[:, :, TOP] - stats[:, :, M] > HEADROOM)

        def again(_):
            return jnp.ones((), bool), run(exact=True)

        # A loop and not a branch: what does not enter it is passed on without a copy.
        state = (jnp.zeros((), bool), run(exact=False))
        _, (o, stats) = jax.lax.while_loop(too_high, again, state)
        m, total, top = (stats[:, :, x, :T] for x in (M, TOTAL, TOP))
        o = o.reshape(*o.shape[:2], -1, at.sizes.V)
        return o[None, :, :T], m[None], total[None], top.max((0, 2)) / LOG2E

    @staticmethod
    def backward(q, d_o, m, delta, row: Row, add, carry):
        T, at = q.shape[2], _Chunk(q, row)
        m, delta = (jnp.pad(x[0], ((0, 0), (0, 0), (0, at.padding))) for x in (m, delta))
        doT, numbers = tpu_backward.per_query(at.padded(d_o[0]), m, delta)

        def added(carry, j, dk, dk_shared, dv):
            return add(carry, j, dk[:, :T], dk_shared[:, :T], dv[:, :T])

        keys, ids = at.keys(row.chunk)
        dqT, *of_keys = tpu_backward.gradients(at.sizes, at.qT, doT, *keys, numbers, ids)
        carry = added(carry, row.chunk, *of_keys)

        def pair(j, state):
            dqT, carry = state
            keys, k_ids = at.keys(j)
            more, *of_keys = tpu_pairs.gradients(at.sizes, at.qT, doT, *keys, numbers, ids, k_ids)
            return dqT + more, added(carry, j, *of_keys)

        dqT, carry = jax.lax.fori_loop(*at.before, pair, (dqT, carry))
        dq = jnp.transpose(tpu_backward.whole_dq(at.sizes, dqT), (0, 3, 1, 2))
        return dq[None, :, :T], carry


def _flat(x):
    return x.reshape(*x.shape[:2], -1)


class _Chunk:
    """The operands of the kernels: chunks padded to whole blocks of the kernels."""

    def __init__(self, q, row: Row):
        T = q.shape[2]
        block = block_size(T, q.dtype)
        self.row, self.padding = row, round_up(T, block) - T
        k, k_shared, v = jax.eval_shape(row.keys, 0)
        self.sizes = Sizes(
            n=(T + self.padding) // block,
            block=block,
            N=k.shape[-1],
            R=k_shared.shape[-1],
            V=v.shape[-1],
            scale=row.scale,
            segmented=True,
        )
        self.qT = jnp.transpose(self.padded(q[0]), (0, 2, 3, 1))
        first, end, *_ = row.visits
        self.before = first, jnp.minimum(end, row.chunk)  # chunks

    def padded(self, x):
        if not self.padding:
            return x
        return jnp.pad(x, ((0, 0), (0, self.padding)) + ((0, 0),) * (x.ndim - 2))

    def keys(self, j):
        """(k_n, k_shared, v) and the documents of a chunk."""
        k_n, k_shared, v = map(self.padded, self.row.keys(j))
        return (k_n, k_shared, v), self.padded(self.row.segments[j])


BACKENDS: dict[str, dispatch.Backend] = {
    "pallas_tpu": (Kernels, pallas_tpu.unsupported),
    "blocks": (Blocks, dispatch.always),
}
