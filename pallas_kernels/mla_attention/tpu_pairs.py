"""TPU kernels for queries of one chunk of a row and keys of a chunk before it, of equal length.

Their pairs of blocks are the square beside the diagonal in the triangle of the row [keys | queries]:
2n blocks, of which the first n are keys and the others queries. Documents and what is skipped
are those of that row; the steps are those of the whole-row kernels, and so are results and numerics.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from k3jax.pallas_kernels.mla_attention import tpu_backward, tpu_forward
from k3jax.pallas_kernels.mla_attention.tpu_forward import TOP, TOTAL, M, Sizes
from k3jax.pallas_kernels.mla_attention.tpu_grid import F32, document_tables, mixed


def forward(sizes: Sizes, qT, k, k_shared, v, q_ids, k_ids, before, *, exact: bool):
    """What `tpu_forward.forward` gives, of these keys and those that `before` is the result of; o is
    [B T H*V], which no other layout is made of between calls.

    The reference point of `before` stays, unless `exact`; of it at least one key must have counted
    for each query that is not padding.
    """
    if exact:
        sizes = sizes.within(1024)
    n = sizes.n

    def query(b, h, i, j, *_):
        return i

    def key(b, h, i, j, *tables):
        return jnp.minimum(jnp.maximum(j, tables[2][b, n + i]), n - 1)

    body = functools.partial(_forward_kernel, sizes, exact)
    name = "mla_attention_pair" + ("_exact" if exact else "")
    tables = document_tables(jnp.concatenate([k_ids, q_ids], 1), sizes.block)
    return tpu_forward.run(
        sizes, body, name, (n, n), query, key, qT, k, k_shared, v, (q_ids, k_ids), tables, before
    )


def _forward_kernel(sizes: Sizes, exact: bool, ref):
    b, i, j, n = pl.program_id(0), pl.program_id(2), pl.program_id(3), sizes.n

    @pl.when(j == 0)
    def _():
        stats = ref["stats_before"]
        total = stats[TOTAL : TOTAL + 1]
        ref["m"][...] = stats[M : M + 1]
        ref["acc"][...] = jnp.transpose(ref["o_before"][...]) * total
        ref["top"][...] = jnp.broadcast_to(stats[TOP : TOP + 1], ref["top"].shape)
        ref["sums"][...] = jnp.zeros(ref["sums"].shape, F32)
        ref["sums"][:1] = total

    step = tpu_forward.anchored
    if exact:
        step = functools.partial(tpu_forward.following, diagonal=False)
    active = j >= ref["first"][b, n + i]
    several = mixed(ref["lowest"], ref["largest"], b, n + i, j)
    _visit(functools.partial(step, sizes, ref), active, several)
    pl.when(j == n - 1)(lambda: tpu_forward.finish(sizes, ref))


def gradients(sizes: Sizes, qT, doT, k, k_shared, v, numbers, q_ids, k_ids):
    """What `tpu_backward.gradients` gives, of these pairs alone."""
    sizes = sizes.within(tpu_backward.LARGEST_BLOCK)
    n = sizes.n

    def pair(dkv, b, r, c, *tables):
        if dkv:  # keys outside
            return jnp.maximum(jnp.minimum(c, tables[3][b, r] - n), 0), r
        return r, jnp.minimum(jnp.maximum(c, tables[2][b, n + r]), n - 1)

    tables = document_tables(jnp.concatenate([k_ids, q_ids], 1), sizes.block)
    return tpu_backward.run(
        sizes, _backward_kernel, "mla_attention_pair_backward", (n, n), pair,
        qT, doT, k, k_shared, v, numbers, (q_ids, k_ids), tables,
    )  # fmt: skip


def _backward_kernel(sizes: Sizes, dq: bool, dkv: bool, ref):
    b, r, c, n = pl.program_id(0), pl.program_id(2), pl.program_id(3), sizes.n
    i, j = (c, r) if dkv else (r, c)
    step = functools.partial(tpu_backward.add_pair, sizes, dq, dkv, ref, i if dkv else 0)

    if dq:

        @pl.when((r == 0) & (c == 0) if dkv else c == 0)
        def _():
            ref["dqT"][...] = jnp.zeros(ref["dqT"].shape, F32)

    if dkv:
        pl.when(c == 0)(lambda: tpu_backward.begin_keys(ref))
    active = (n + i <= ref["last"][b, j]) if dkv else (j >= ref["first"][b, n + i])
    several = mixed(ref["lowest"], ref["largest"], b, n + i, j)
    _visit(functools.partial(step, diagonal=False), active, several)
    if dkv:
        pl.when(c == n - 1)(lambda: tpu_backward.finish_keys(sizes, ref))


def _visit(step, active, several):
    """One pair of blocks, if it counts; with masks, if those of several documents meet."""
    pl.when(active & several)(lambda: step(masked=True))
    pl.when(active & ~several)(lambda: step(masked=False))
