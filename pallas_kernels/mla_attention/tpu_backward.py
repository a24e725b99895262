"""The backward TPU kernels: a block of keys meets its blocks of queries, the diagonal one first.

With p and its gradient as [keys, queries], as in the forward kernel, and two numbers per query, its
reference point m and delta = o . d_o. The sum that makes p a softmax has already divided d_o:

    p = exp2(bits k q^T - m)          dp = v d_o^T        ds = p (dp - delta)
    dv^T += d_o^T p^T                 dk^T += q^T ds^T    dq^T += k^T ds

All products stream rows of a transposed operand past a square of p or ds, which wastes the least of
the matrix units. One kernel makes everything, if dq of a whole row of the batch fits on chip; else
one makes dk and dv, and one dq.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from k3jax.pallas_kernels.mla_attention.tpu_forward import Sizes
from k3jax.pallas_kernels.mla_attention.tpu_grid import (
    F32,
    allowed,
    column,
    document_tables,
    folded,
    kernel_call,
    matmul,
    mixed,
    split,
    unfold,
)
from k3jax.pallas_kernels.tpu_chip import VMEM_BYTES

LARGEST_BLOCK = 1024  # tokens
QUERIES, KEYS = 256, 256  # of a part of a step
M, DELTA, STATS = 0, 1, 8  # rows of the numbers per query


def backward(sizes: Sizes, qT, k, k_shared, v, d_o, m, delta, segment_ids):
    """(dqT [B H Q T], dk [B T H N], dk_shared [B T R], dv [B T H V]) in the inputs' dtype."""
    doT, numbers = per_query(d_o, m, delta)
    dqT, dk, dk_shared, dv = gradients(sizes, qT, doT, k, k_shared, v, numbers, segment_ids)
    return whole_dq(sizes, dqT).astype(qT.dtype), dk, dk_shared.astype(k.dtype), dv


def per_query(d_o, m, delta):
    """What the kernels take of the queries: d_o transposed, and their numbers [B H STATS T]."""
    numbers = jnp.stack([m, delta], axis=2)
    numbers = jnp.pad(numbers, ((0, 0), (0, 0), (0, STATS - 2), (0, 0)))
    return jnp.transpose(d_o, (0, 2, 3, 1)), numbers


def whole_dq(sizes: Sizes, dqT):
    """dqT [B H Q T] from what the kernels make of it."""
    B, H, _, Q, _ = dqT.shape
    return dqT.swapaxes(2, 3).reshape(B, H, Q, -1) * sizes.scale


def gradients(sizes: Sizes, qT, doT, k, k_shared, v, numbers, segment_ids):
    """(dqT by blocks [B H n Q block], dk, dk_shared, dv): the first, by blocks and without the scale,
    and the third in float32, the others in the inputs' dtype."""
    sizes = sizes.within(LARGEST_BLOCK)
    n = sizes.n
    tables = [] if segment_ids is None else document_tables(segment_ids, sizes.block)

    def pair(dkv, b, r, c, *tables):
        """Blocks (i of queries, j of keys) that a step needs; a skipped one repeats the last."""
        row, at, _ = unfold(n, r, c)
        if dkv:
            j = n - 1 - row
            i = j + at
            return (jnp.minimum(i, tables[3][b, j]) if tables else i), j
        j = jnp.where(at == 0, row, at - 1)
        return row, (jnp.maximum(j, tables[2][b, row]) if tables else j)

    arrays = (qT, doT, k, k_shared, v, numbers, (segment_ids, segment_ids), tables)
    return run(sizes, _kernel, "mla_attention_backward", folded(n), pair, *arrays)


def run(sizes, body, name, pairs, pair, qT, doT, k, k_shared, v, numbers, ids, tables):
    """`gradients` by one kernel or two over the grid `pairs`, whose blocks `pair(dkv, b, r, c)` gives."""
    call = functools.partial(
        _run, sizes, body, pairs, pair, qT, doT, k, k_shared, v, numbers, ids, tables
    )
    # Of the accumulator of dq there are two, as it is written back while the next head begins.
    if 2 * 4 * qT.shape[2] * qT.shape[3] <= VMEM_BYTES * 2 // 3:
        out = call(name, dq=True, dkv=True)
    else:
        out = call(name + "_kv", dq=False, dkv=True)
        out |= call(name + "_q", dq=True, dkv=False)
    dk_shared = (out["dk_sharedT"].sum(1) * sizes.scale).swapaxes(1, 2)
    return out["dqT"], out["dk"].reshape(k.shape), dk_shared, out["dv"].reshape(v.shape)


def _run(sizes, body, pairs, pair, qT, doT, k, k_shared, v, numbers, ids, tables, name, *, dq, dkv):
    B, H, Q, T = qT.shape
    n, block, N, R, V = sizes.n, sizes.block, sizes.N, sizes.R, sizes.V

    def spec(shape, index):
        def blocks(b, h, r, c, *tables):
            return index(b, h, *pair(dkv, b, r, c, *tables))

        return pl.BlockSpec((pl.squeezed, *shape), blocks)

    def flat(x):
        return x.reshape(B, T, -1)

    of_query, of_key = (lambda b, h, i, j: (b, h, 0, i)), (lambda b, h, i, j: (b, j, h))
    inputs = {
        "qT": (qT, spec((pl.squeezed, Q, block), of_query)),
        "doT": (doT, spec((pl.squeezed, V, block), of_query)),
        "k": (flat(k), spec((block, N), of_key)),
        "k_shared": (k_shared, spec((block, R), lambda b, h, i, j: (b, j, 0))),
        "v": (flat(v), spec((block, V), of_key)),
        "numbers": (numbers, spec((pl.squeezed, STATS, block), of_query)),
    }
    scalars = {}
    if sizes.segmented:
        q_ids, k_ids = (x[:, None] for x in ids)
        inputs["q_segment"] = (q_ids, spec((1, block), lambda b, h, i, j: (b, 0, i)))
        inputs["k_segment"] = (k_ids, spec((1, block), lambda b, h, i, j: (b, 0, j)))
        scalars = dict(zip(("lowest", "largest", "first", "last"), tables, strict=True))
    outputs, scratch = {}, {"kT": ((Q, block), k.dtype)}
    if dkv:
        transposed = jax.ShapeDtypeStruct((B, H, R, T), F32)
        like = jax.ShapeDtypeStruct
        outputs = {
            "dk": (like((B, T, H * N), k.dtype), spec((block, N), of_key)),
            "dv": (like((B, T, H * V), v.dtype), spec((block, V), of_key)),
            "dk_sharedT": (
                transposed,
                spec((pl.squeezed, R, block), lambda b, h, i, j: (b, h, 0, j)),
            ),
        }
        scratch |= {"dkT": ((Q, block), F32), "dvT": ((V, block), F32)}
    if dq:
        shape = jax.ShapeDtypeStruct((B, H, n, Q, block), F32)
        if dkv:
            outputs["dqT"] = (
                shape,
                spec((pl.squeezed, n, Q, block), lambda b, h, i, j: (b, h, 0, 0, 0)),
            )
        else:
            outputs["dqT"] = (
                shape,
                spec((pl.squeezed, 1, Q, block), lambda b, h, i, j: (b, h, i, 0, 0)),
            )
    body = functools.partial(body, sizes, dq, dkv)
    return kernel_call(body, name, (B, H, *pairs), scalars, inputs, outputs, scratch)


def _kernel(sizes: Sizes, dq: bool, dkv: bool, ref):
    b, r, c, n = pl.program_id(0), pl.program_id(2), pl.program_id(3), sizes.n
    row, at, last = unfold(n, r, c)
    if dkv:
        j = n - 1 - row
        i = j + at
    else:
        i, j = row, jnp.where(at == 0, row, at - 1)
    step = functools.partial(add_pair, sizes, dq, dkv, ref, i if dkv else 0)

    if dq:

        @pl.when((r == 0) & (c == 0) if dkv else at == 0)
        def _():
            ref["dqT"][...] = jnp.zeros(ref["dqT"].shape, F32)

    @pl.when(at == 0)
    def _():
        if dkv:
            begin_keys(ref)
        step(diagonal=True, masked=sizes.segmented)

    if sizes.segmented:
        active = (at > 0) & ((i <= ref["last"][b, j]) if dkv else (j >= ref["first"][b, i]))
        several = mixed(ref["lowest"], ref["largest"], b, i, j)
        pl.when(active & several)(lambda: step(diagonal=False, masked=True))
        pl.when(active & ~several)(lambda: step(diagonal=False, masked=False))
    else:
        pl.when(at > 0)(lambda: step(diagonal=False, masked=False))

    if dkv:
        pl.when(last)(lambda: finish_keys(sizes, ref))


def begin_keys(ref):
    transpose_keys(ref)
    for name in ("dkT", "dvT"):
        ref[name][...] = jnp.zeros(ref[name].shape, F32)


def finish_keys(sizes: Sizes, ref):
    """Writes the gradients of a block of keys."""
    N, dtype = sizes.N, ref["dk"].dtype
    ref["dk"][...] = jnp.transpose(ref["dkT"][:N] * sizes.scale).astype(dtype)
    ref["dk_sharedT"][...] = ref["dkT"][N:]
    ref["dv"][...] = jnp.transpose(ref["dvT"][...]).astype(dtype)


def transpose_keys(ref):
    N = ref["k"].shape[1]
    ref["kT"][:N] = jnp.transpose(ref["k"][...])
    ref["kT"][N:] = jnp.transpose(ref["k_shared"][...])


def add_pair(sizes: Sizes, dq: bool, dkv: bool, ref, i, *, diagonal: bool, masked: bool):
    """What one pair of blocks adds to the gradients."""
    if not dkv:
        transpose_keys(ref)
    q_segment = ref["q_segment"][...] if masked else None
    k_segment = column(ref["k_segment"][...]) if masked else None
    dtype = ref["k"].dtype
    waiting = []

    def weigh(keys, queries):
        k = jnp.concatenate([ref["k"][keys], ref["k_shared"][keys]], axis=1)
        s = matmul(k, ref["qT"][:, queries], (1, 0)) * sizes.bits
        dp = matmul(ref["v"][keys], ref["doT"][:, queries], (1, 0))
        p = jnp.exp2(s - ref["numbers"][M : M + 1, queries])
        ds = p * (dp - ref["numbers"][DELTA : DELTA + 1, queries])
        causal = diagonal and keys.stop - 1 > queries.start
        mask = allowed(s.shape, keys, queries, causal, k_segment, q_segment)
        if mask is not None:  # a masked p may be infinite
            p, ds = jnp.where(mask, p, 0.0), jnp.where(mask, ds, 0.0)
        waiting.append((keys, queries, p.astype(dtype), ds.astype(dtype)))

    def add():
        keys, queries, p, ds = waiting.pop(0)
        if dkv:
            ref["dvT"][:, keys] += matmul(ref["doT"][:, queries], p, (1, 1))
            ref["dkT"][:, keys] += matmul(ref["qT"][:, queries], ds, (1, 1))
        if dq:
            ref["dqT"][i, :, queries] += matmul(ref["kT"][:, keys], ds, (1, 0))

    # Code is scheduled close to its order: p and ds of one part beside the products of the last.
    for queries in split(sizes.block, QUERIES):
        end = queries.stop if diagonal else sizes.block
        for keys in split(end, KEYS):
            weigh(keys, queries)
            if len(waiting) > 1:
                add()
    while waiting:
        add()
