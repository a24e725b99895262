"""The forward TPU kernel: a block of queries meets its blocks of keys, the diagonal one first.

Everything is transposed: logits are [keys, queries], so that statistics of a query are reductions
over sublanes and one number per lane, and the output is [V, queries] until a row is done. The
diagonal block makes an ordinary softmax with its largest logit. The other blocks keep that as
their reference point: exp2(s - m) may exceed 1, which float32 and bfloat16 stand up to `HEADROOM`,
and nothing waits for a maximum. Where a later logit exceeds the reference by more, the caller is told
and runs `exact`, the kernel whose reference point follows the maximum.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from k3jax.pallas_kernels.mla_attention.tpu_grid import (
    F32,
    LOG2E,
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

HEADROOM = 64.0  # bits by which a logit may exceed the reference point: sums stay in float32
QUERIES, KEYS = 256, 2048  # of a part of a step
STATS = 8  # rows of the statistics per query, of which three are used:
# reference point and largest logit in powers of two, and sum of exp2(s - m), 1 for padding
M, TOP, TOTAL = 0, 1, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Static facts of a call."""

    n: int  # blocks of a row
    block: int  # tokens
    N: int  # key channels of a head
    R: int  # key channels that heads share
    V: int
    scale: float
    segmented: bool

    @property
    def bits(self) -> float:
        """Factor from q . k to logits in powers of two."""
        return self.scale * LOG2E

    def within(self, largest: int) -> "Sizes":
        """The same with half the block, if it is larger than that."""
        if self.block <= largest:
            return self
        return dataclasses.replace(self, n=2 * self.n, block=self.block // 2)


def forward(sizes: Sizes, qT, k, k_shared, v, segment_ids, *, exact: bool):
    """(o [B T H V], statistics [B H STATS T]) of qT [B H Q T], k [B T H N], k_shared [B T R], v."""
    if exact:  # rarely run: shorter code
        sizes = sizes.within(1024)
    tables = [] if segment_ids is None else document_tables(segment_ids, sizes.block)
    n = sizes.n

    def query(b, h, r, c, *_):
        return unfold(n, r, c)[0]

    def key(b, h, r, c, *tables):
        row, at, _ = unfold(n, r, c)
        j = jnp.where(at == 0, row, at - 1)
        # A skipped block is not fetched: its index is that of the next one used, or of the last.
        return jnp.maximum(j, tables[2][b, row]) if tables else j

    body = functools.partial(_kernel, sizes, exact)
    name = "mla_attention_forward" + ("_exact" if exact else "")
    ids = (segment_ids, segment_ids)
    o, stats = run(sizes, body, name, folded(n), query, key, qT, k, k_shared, v, ids, tables)
    return o.reshape(*v.shape[:3], sizes.V), stats


def run(sizes, body, name, pairs, query, key, qT, k, k_shared, v, ids, tables, before=None):
    """`forward`, but o [B T H*V], by a kernel over the grid `pairs`, of which `query` and `key` give the blocks.

    Args:
        ids: documents of the queries and of the keys.
        tables: `document_tables`, as far as there are documents.
        before: the results for other keys, which the kernel adds to in place.
    """
    B, H, Q, T = qT.shape
    block = sizes.block

    def spec(shape, index):
        return pl.BlockSpec((pl.squeezed, *shape), index)

    inputs = {
        "qT": (qT, spec((pl.squeezed, Q, block), lambda *g: (g[0], g[1], 0, query(*g)))),
        "k": (_flat(k), spec((block, sizes.N), lambda *g: (g[0], key(*g), g[1]))),
        "k_shared": (k_shared, spec((block, sizes.R), lambda *g: (g[0], key(*g), 0))),
        "v": (_flat(v), spec((block, sizes.V), lambda *g: (g[0], key(*g), g[1]))),
    }
    scalars = {}
    if sizes.segmented:
        q_ids, k_ids = (x[:, None] for x in ids)
        inputs["q_segment"] = (q_ids, spec((1, block), lambda *g: (g[0], 0, query(*g))))
        inputs["k_segment"] = (k_ids, spec((1, block), lambda *g: (g[0], 0, key(*g))))
        scalars = dict(zip(("lowest", "largest", "first", "last"), tables, strict=True))
    outputs = {
        "o": (
            jax.ShapeDtypeStruct((B, T, H * sizes.V), F32),
            spec((block, sizes.V), lambda *g: (g[0], query(*g), g[1])),
        ),
        "stats": (
            jax.ShapeDtypeStruct((B, H, STATS, T), F32),
            spec((pl.squeezed, STATS, block), lambda *g: (g[0], g[1], 0, query(*g))),
        ),
    }
    updates = {}
    if before is not None:
        o, stats = before
        inputs["o_before"] = (o, outputs["o"][1])
        inputs["stats_before"] = (stats, outputs["stats"][1])
        updates = {"o_before": "o", "stats_before": "stats"}
    scratch = {
        "m": ((1, block), F32),
        "sums": ((8, block), F32),
        "top": ((8, block), F32),
        "acc": ((sizes.V, block), F32),
        "vT": ((sizes.V, block), v.dtype),
    }
    out = kernel_call(body, name, (B, H, *pairs), scalars, inputs, outputs, scratch, updates)
    return out["o"], out["stats"]


def _flat(x):
    return x.reshape(*x.shape[:2], -1)


def _kernel(sizes: Sizes, exact: bool, ref):
    b, n = pl.program_id(0), sizes.n
    row, at, last = unfold(n, pl.program_id(2), pl.program_id(3))
    j = jnp.where(at == 0, row, at - 1)

    @pl.when(at == 0)
    def _():
        following(sizes, ref, diagonal=True, masked=sizes.segmented)

    block = functools.partial(following, diagonal=False) if exact else anchored
    if sizes.segmented:
        active = (at > 0) & (j >= ref["first"][b, row])
        several = mixed(ref["lowest"], ref["largest"], b, row, j)
        pl.when(active & several)(lambda: block(sizes, ref, masked=True))
        pl.when(active & ~several)(lambda: block(sizes, ref, masked=False))
    else:
        pl.when(at > 0)(lambda: block(sizes, ref, masked=False))

    pl.when(last)(lambda: finish(sizes, ref))


def finish(sizes: Sizes, ref):
    """Writes the results of a block of queries."""
    total = ref["sums"][...].sum(0, keepdims=True)
    total = jnp.where(total > 0, total, 1.0)  # 0 at padding
    ref["o"][...] = jnp.transpose(ref["acc"][...] / total)
    ref["stats"][M : M + 1] = ref["m"][...]
    ref["stats"][TOP : TOP + 1] = ref["top"][...].max(0, keepdims=True)
    ref["stats"][TOTAL : TOTAL + 1] = total
    ref["stats"][TOTAL + 1 :] = jnp.zeros((STATS - TOTAL - 1, sizes.block), F32)


class _Logits:
    """Logits of parts of a pair of blocks, in powers of two, -inf where masked."""

    def __init__(self, sizes, ref, *, causal, masked):
        self.sizes, self.ref, self.causal = sizes, ref, causal
        self.q_segment = ref["q_segment"][...] if masked else None
        self.k_segment = column(ref["k_segment"][...]) if masked else None
        ref["vT"][...] = jnp.transpose(ref["v"][...])

    def __call__(self, keys: slice, queries: slice):
        ref = self.ref
        k = jnp.concatenate([ref["k"][keys], ref["k_shared"][keys]], axis=1)
        s = matmul(k, ref["qT"][:, queries], (1, 0)) * self.sizes.bits
        causal = self.causal and keys.stop - 1 > queries.start
        mask = allowed(s.shape, keys, queries, causal, self.k_segment, self.q_segment)
        return s if mask is None else jnp.where(mask, s, -jnp.inf)


def _tops(s):
    """Largest of every eighth row: no reduction inside a register."""
    return s.reshape(-1, 8, s.shape[1]).max(0)


def _sums(p):
    return p.reshape(-1, 8, p.shape[1]).sum(0)


def anchored(sizes: Sizes, ref, *, masked: bool):
    """A block below the diagonal, with the reference point that the diagonal block has set."""
    logits = _Logits(sizes, ref, causal=False, masked=masked)
    waiting = []

    def weigh(queries, keys):
        s = logits(keys, queries)
        ref["top"][:, queries] = jnp.maximum(ref["top"][:, queries], _tops(s))
        p = jnp.exp2(s - ref["m"][:, queries])
        ref["sums"][:, queries] += _sums(p)
        waiting.append((queries, keys, p.astype(ref["vT"].dtype)))

    def read():
        queries, keys, p = waiting.pop(0)
        ref["acc"][:, queries] += matmul(ref["vT"][:, keys], p, (1, 0))

    # Code is scheduled close to its order: logits of one part while the part before is read.
    for queries in split(sizes.block, QUERIES):
        for keys in split(sizes.block, KEYS):
            weigh(queries, keys)
            if len(waiting) > 1:
                read()
    while waiting:
        read()


def following(sizes: Sizes, ref, *, diagonal: bool, masked: bool):
    """A block whose reference point is the largest logit so far; the diagonal one begins a row."""
    logits = _Logits(sizes, ref, causal=diagonal, masked=masked)
    size = 256 if diagonal else 512
    waiting = []

    def weigh(queries):
        end = queries.stop if diagonal else sizes.block
        keys = split(end, size)
        parts = [logits(part, queries) for part in keys]
        tops = functools.reduce(jnp.maximum, map(_tops, parts))
        m = tops.max(0, keepdims=True)
        if diagonal:
            m = jnp.where(m == -jnp.inf, 0.0, m)  # a query of padding
            ref["top"][:, queries] = tops
            decay = None
        else:
            ref["top"][:, queries] = jnp.maximum(ref["top"][:, queries], tops)
            m = jnp.maximum(ref["m"][:, queries], m)
            decay = jnp.exp2(ref["m"][:, queries] - m)
        ref["m"][:, queries] = m
        parts = [jnp.exp2(s - m) for s in parts]
        sums = sum(map(_sums, parts))
        before = 0.0 if decay is None else ref["sums"][:, queries] * decay
        ref["sums"][:, queries] = before + sums
        p = jnp.concatenate([p.astype(ref["vT"].dtype) for p in parts], axis=0)
        waiting.append((queries, slice(0, end), p, decay))

    def read():
        queries, keys, p, decay = waiting.pop(0)
        before = 0.0 if decay is None else ref["acc"][:, queries] * decay
        ref["acc"][:, queries] = before + matmul(ref["vT"][:, keys], p, (1, 0))

    for queries in split(sizes.block, size):
        weigh(queries)
        if len(waiting) > 1:
            read()
    while waiting:
        read()
