"""The decoding step on a TPU: pages come one by one from wherever the page table says.

A grid step takes several pages of one request, each an operand of its own, so that the pipeline has
as many copies in flight. Heads are rows: the cache is what the matrix units hold, and 96 queries
pass by.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from k3jax.pallas_kernels.mla_attention.tpu_grid import (
    F32,
    LANES,
    LOG2E,
    matmul,
    round_up,
)
from k3jax.pallas_kernels.tpu_chip import SPARE, VMEM_BYTES

STEP_TOKENS = 2048  # of a grid step, at most
MOST_PAGES = 16  # of a grid step


def unsupported(q, pages, kv_rank: int) -> str | None:
    """Why the kernel cannot run a call, or None."""
    if pages.dtype not in (jnp.bfloat16, jnp.float32):
        return f"pages are {pages.dtype}; needs bfloat16 or float32"
    if q.dtype not in (pages.dtype, jnp.float32):
        return f"q is {q.dtype} and pages {pages.dtype}; needs the same or float32"
    width_bytes = round_up(pages.shape[2], LANES) * pages.dtype.itemsize
    if pages.shape[1] % 16 or pages.shape[1] == 0:
        return f"pages of {pages.shape[1]} tokens; needs a multiple of 16"
    # A page comes while another is read; the logits of a step's tokens lie beside them.
    held = max(pages.shape[1], STEP_TOKENS) * (2 * width_bytes + 3 * 4 * round_up(q.shape[1], 16))
    if held > VMEM_BYTES - SPARE:
        return f"pages of {pages.shape[1]} tokens and {q.shape[1]} heads do not fit on the chip"
    if kv_rank % LANES:
        return f"kv_rank = {kv_rank}; needs a multiple of {LANES}"
    return None


def pallas_tpu(
    q: Float[Array, "B H C"],
    pages: Float[Array, "P S C"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    scale: float,
    kv_rank: int,
) -> Float[Array, "B H R"]:
    """`decode.mla_decode` by one kernel.

    Numerics: a float32 q or p goes through the matrix units in two parts where the cache is
        bfloat16, which are right to 16 bits together.
    """
    B, H, C = q.shape
    size, most = pages.shape[1], page_table.shape[1]
    together = max(1, min(MOST_PAGES, STEP_TOKENS // size, most))
    heads = round_up(H, 16)
    q = jnp.pad(q, ((0, 0), (0, heads - H), (0, 0)))

    def page(g):
        def index(b, step, table, lengths):
            last = jnp.maximum(lengths[b] - 1, 0) // size
            # Past the end the last page again, which is not copied again.
            at = jnp.minimum(step * together + g, last)
            return jnp.where(lengths[b] > 0, table[b, at], 0), 0, 0

        return pl.BlockSpec((pl.squeezed, size, C), index)

    def row(b, step, *_):
        return b, 0, 0

    kernel = functools.partial(_kernel, size=size, bits=scale * LOG2E, kv_rank=kv_rank)
    o = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, -(-most // together)),
            in_specs=[
                pl.BlockSpec((pl.squeezed, heads, C), row),
                *[page(g) for g in range(together)],
            ],
            out_specs=pl.BlockSpec((pl.squeezed, heads, kv_rank), row),
            scratch_shapes=[
                pltpu.VMEM((heads, 1), F32),
                pltpu.VMEM((heads, 1), F32),
                pltpu.VMEM((heads, kv_rank), F32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, heads, kv_rank), F32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        name="mla_decode",
    )(page_table.astype(jnp.int32), lengths.astype(jnp.int32), q, *[pages] * together)
    return o[:, :H]


def _left(length, before):
    """Tokens of a request from this step on; the benchmark puts a known number here."""
    return length - before


def _kernel(table, lengths, q, *refs, size: int, bits: float, kv_rank: int):
    *pages, o, m, total, acc = refs
    b, step = pl.program_id(0), pl.program_id(1)
    tokens = size * len(pages)
    left = _left(lengths[b], step * tokens)

    @pl.when(step == 0)
    def _():
        m[...] = jnp.full(m.shape, -1e30, F32)
        total[...] = jnp.zeros(total.shape, F32)
        acc[...] = jnp.zeros(acc.shape, F32)

    def attend(whole: bool):
        rows = jnp.concatenate([page[...] for page in pages], axis=0)
        if not whole:  # 0 * NaN is NaN
            token = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0)
            rows = jnp.where(token < left, rows, 0)
        s = _product(q[...], rows, (1, 1)) * bits
        if not whole:
            token = jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where(token < left, s, -jnp.inf)
        new = jnp.maximum(m[...], s.max(1, keepdims=True))
        decay = jnp.exp2(m[...] - new)
        p = jnp.exp2(s - new)
        m[...] = new
        total[...] = total[...] * decay + p.sum(1, keepdims=True)
        acc[...] = acc[...] * decay + _product(p.astype(q.dtype), rows[:, :kv_rank], (1, 0))

    pl.when(left >= tokens)(lambda: attend(True))
    pl.when((left > 0) & (left < tokens))(lambda: attend(False))

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        o[...] = acc[...] / jnp.where(total[...] == 0, 1.0, total[...])


def _product(a, rows, contract):
    """a times rows; float32 against bfloat16 in two parts, one below the other."""
    if a.dtype == rows.dtype:
        return matmul(a, rows, contract)
    high = a.astype(rows.dtype)
    low = (a - high.astype(F32)).astype(rows.dtype)
    both = matmul(jnp.concatenate([high, low], axis=0), rows, contract)
    return both[: a.shape[0]] + both[a.shape[0] :]
