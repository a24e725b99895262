"""What `bench` measures: K3's problem, ours and the peer's calls for it, and the check of both.

From logits: raw q, k, v and decay logits z in one dtype, K = V = 128, g_min = -5. Ours as the model
has them, token-major [B, T, H K]; the peer (tokamax) in its own [H, B, T, K]. `tpu_cost` compiles
the factories `case` and `decode_case` in an interpreter that may have little more than JAX.
"""

import contextlib
import dataclasses
import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels import tpu_cost
from k3jax.pallas_kernels.kda import kda_from_logits, kda_step, kda_verify

MODULE = "k3jax.pallas_kernels.kda.bench_cases"
HEAD_DIM, CHUNK, G_MIN = 128, 64, -5.0
PASSES = {"fwd": False, "fwd+bwd": True}  # name -> with the gradients of all inputs
NUM_FLOATS = 7  # inputs that have a gradient
# Largest error against float64, in norm (k3jax.testing's table).
LIMIT = {"float32": 1e-5, "bfloat16": 2e-2}

Args = tuple[Any, ...]
Run = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    T: int  # tokens of a row
    H: int  # heads
    B: int = 1  # rows
    dtype: str = "bfloat16"
    documents: tuple[int, ...] = ()  # lengths, where the row is packed; padding after each
    padded_to: int = 0  # tokens that each document takes, if more than its length
    offsets: bool = False  # packed by cu_seqlens instead of segment_ids
    checkpoint_every: int = 1  # chunks between two memories kept for the backward pass

    def shapes(self, *, head_first: bool = False) -> Args:
        """q, k, v, z, beta, A_log, dt_bias and, if packed, segment ids or offsets."""
        B, T, H, K = self.B, self.T, self.H, HEAD_DIM
        token = (H, B, T, K) if head_first else (B, T, H * K)
        beta = (H, B, T) if head_first else (B, T, H)
        tokens = [jax.ShapeDtypeStruct(shape, self.dtype) for shape in (*[token] * 4, beta)]
        gate = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((H,), (H * K,))]
        layout = (len(self.documents) + 1,) if self.offsets else (B, T)
        packing = [jax.ShapeDtypeStruct(layout, "int32")] if self.documents else []
        return (*tokens, *gate, *packing)

    def values(self) -> Args:
        """Random inputs, token-major."""
        draw = np.random.default_rng(0)
        q, k, v, z, beta, A_log, dt_bias, *layout = self.shapes()
        args = [
            jnp.asarray(draw.standard_normal(x.shape, np.float32), x.dtype) for x in (q, k, v, z)
        ]
        args += [jnp.asarray(draw.uniform(size=x.shape), x.dtype) for x in (beta, A_log, dt_bias)]
        return (*args, *(jnp.asarray(self._layout(), x.dtype) for x in layout))

    def _layout(self) -> np.ndarray:
        if self.offsets:
            return np.cumsum((0, *self.documents))
        ids = [
            np.where(np.arange(max(n, self.padded_to)) < n, i, 0)
            for i, n in enumerate(self.documents, 1)
        ]
        return np.concatenate(ids)[None]

    def fields(self) -> dict[str, Any]:
        """What a record says about the problem."""
        kept = {name: getattr(self, name) for name in ("B", "T", "H", "dtype")}
        return kept | {"K": HEAD_DIM, "V": HEAD_DIM}


def ours(problem: Problem, backend: str) -> Run:
    """The op from token-major inputs, [B, T, H V] out."""

    def run(q, k, v, z, beta, A_log, dt_bias, layout=None):
        heads = (*q.shape[:2], problem.H, HEAD_DIM)
        o, _ = kda_from_logits(
            q.reshape(heads),
            k.reshape(heads),
            v.reshape(heads),
            z.reshape(heads),
            beta,
            A_log,
            dt_bias.reshape(problem.H, HEAD_DIM),
            g_min=G_MIN,
            segment_ids=None if problem.offsets else layout,
            cu_seqlens=layout if problem.offsets else None,
            chunk_size=CHUNK,
            checkpoint_every=problem.checkpoint_every,
            backend=backend,
        )
        return o.reshape(v.shape)

    return run


def tokamax(implementation: str) -> Run:
    """The peer, head-first."""
    package = "tokamax._src.ops.kda"
    api = importlib.import_module(f"{package}.api")
    # It asks the default device, here a CPU, whether it can run, and declines v5 chips.
    mosaic = importlib.import_module(f"{package}.pallas_mosaic_tpu")
    kernel = mosaic.PallasMosaicTpuKimiDeltaAttention
    kernel.supported_on = lambda self, device: True

    def run(q, k, v, z, beta, A_log, dt_bias):
        return api.kimi_delta_attention(
            q,
            k,
            v,
            z,
            beta,
            a_log=A_log,
            delta_time_bias=dt_bias,
            use_qk_l2norm=True,
            use_gate_in_kernel=True,
            lower_bound=G_MIN,
            implementation=implementation,
        )[0]

    return run


def tokamax_name(python: str = sys.executable) -> str | None:
    """Name and version of the peer in an interpreter; None if it is not there."""
    ask = "import importlib.metadata as m; print(m.version('tokamax'))"
    found = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    return None if found.returncode else f"tokamax {found.stdout.strip()}"


def head_first(args: Args, H: int) -> Args:
    """Token-major inputs as the peer takes them."""
    q, k, v, z, beta, *gate = args
    tokens = (jnp.moveaxis(x.reshape(*x.shape[:2], H, -1), 2, 0) for x in (q, k, v, z))
    return (*tokens, jnp.moveaxis(beta, 2, 0), *gate)


def with_gradients(run: Run) -> Callable[..., Any]:
    """(output, gradients of all float inputs) for a given gradient of the output."""

    def both(d_o, *args):
        floats, layout = args[:NUM_FLOATS], args[NUM_FLOATS:]
        o, pull = jax.vjp(lambda *x: run(*x, *layout), *floats)
        return o, pull(d_o)

    return both


def case(impl: str, problem: Mapping[str, Any], backward: bool) -> tuple[Callable[..., Any], Args]:
    """One pass as (function, shapes); `impl` is a backend of ours or "mosaic", the peer's kernel."""
    p = dataclasses.replace(Problem(**problem), documents=tuple(problem["documents"]))
    peer = impl == "mosaic"
    run, shapes = tokamax(impl) if peer else ours(p, impl), p.shapes(head_first=peer)
    if not backward:
        return run, shapes
    return with_gradients(run), (jax.eval_shape(run, *shapes), *shapes)


def decode_case(op: str, requests: int, H: int, window: int) -> tuple[Callable[..., Any], Args]:
    """One step or one window of drafts (op `verify`) of requests whose states lie in a pool."""

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    lead = (requests, window, H) if op == "verify" else (requests, H)
    x, pool = array(*lead, HEAD_DIM), array(2 * requests, H, HEAD_DIM, HEAD_DIM, dtype="float32")
    g, beta = array(*lead, HEAD_DIM, dtype="float32"), array(*lead, dtype="float32")
    number = array(requests, dtype="int32")
    if op == "verify":

        def verify(q, k, v, g, beta, pool, commit, slots):
            return kda_verify(q, k, v, g, beta, pool, commit, slots=slots)

        return jax.jit(verify, donate_argnums=5), (x, x, x, g, beta, pool, number, number)

    def step(q, k, v, g, beta, pool, slots):
        return kda_step(q, k, v, g, beta, pool, slots=slots)

    return jax.jit(step, donate_argnums=5), (x, x, x, g, beta, pool, number)


def paper_floors(chip: tpu_cost.Chip, problem: Problem, backward: bool) -> dict[str, float]:
    """Microseconds that one fused kernel needs at least on a chip's vector units, MXUs and HBM.

    Per head and chunk of C tokens, K = V = d, the forward pass has these matmuls (rows,
    contraction, columns): scores of keys and queries 2 (C, d, C); the inverse applied to values and
    keys 2 (C, C, d), one pass on a wide MXU; memory read 2 (C, d, d) and written (d, C, d); outputs
    (C, C, d); log2(C / 16) merges of the inverse, two each on half of the rows. The backward pass
    repeats them and has two for each, and two (C, C, C) for the inverse. An MXU of width w takes one
    row of w operands a pass, all MXUs of a core 4 rows a cycle. Vector work: passes over [C, d] in
    float32, (8, 128) numbers to a register, 4 registers a cycle.
    """
    C, d, w = CHUNK, HEAD_DIM, chip.mxu_width
    inverse = [(C, C, 2 * d)] if w >= 2 * d else [(C, C, d)] * 2
    forward = [(C, d, C)] * 2 + inverse + [(C, d, d)] * 2 + [(C, C, d), (d, C, d)]
    forward += [(C // 2, C // 2, C // 2)] * (2 * int(math.log2(C // 16)))

    def rows(matmuls):
        return sum(a * math.ceil(b / w) * math.ceil(c / w) for a, b, c in matmuls)

    # gate 7, sums 2 log2 C, decays 6, scalings 6, norms 8, casts 13, additions 4; substitution in
    # the 16 x 16 blocks 3 x 16; and the memory, read and written once per chunk.
    vector = (44 + 2 * math.log2(C) + 48) * d / 1024 + 2 * d * d / 1024 / C
    mxu = rows(forward) / C
    moved = 5 * 2 * d + 2  # q, k, v, z, o and beta in bfloat16
    if backward:
        vector, mxu = 4 * vector, 4 * mxu + rows([(C, C, C)] * 2) / C
        moved += 10 * 2 * d + 4 + 2 * d * d / C  # and gradients, and a bfloat16 memory per chunk
    heads = problem.B * problem.T * problem.H * 1e6
    return {
        "vector": round(heads * vector / 4 / chip.clock / chip.cores, 1),
        "mxu": round(heads * mxu / 4 / chip.clock / chip.cores, 1),
        "hbm": round(heads * moved / chip.hbm, 1),
    }


def errors(backend: str, dtype: str) -> dict[str, dict[str, float]]:
    """Errors of outputs and gradients against the recurrence in float64, in norm.

    A small case on this machine; `pallas_tpu` in interpret mode where there is no TPU.

    Returns: by implementation (ours and, where it can be imported, the peer in plain JAX), by array.
    """
    problem = Problem(T=3 * CHUNK, H=4, dtype=dtype)  # the peer takes whole chunks only
    args = problem.values()
    args = (jnp.asarray(np.random.default_rng(1).standard_normal(args[2].shape), dtype), *args)

    def pull(run: Run, args: Args) -> list[np.ndarray]:
        o, grads = jax.jit(with_gradients(run))(*args)
        return [np.asarray(x, np.float64) for x in (o, *grads)]

    with jax.enable_x64(True):
        wide = tuple(jnp.asarray(np.asarray(x, np.float64)) for x in args)
        want = pull(ours(problem, "reference"), wide)
    interpret = backend == "pallas_tpu" and jax.default_backend() != "tpu"
    with pltpu.force_tpu_interpret_mode() if interpret else contextlib.nullcontext():
        got = {f"k3jax {backend}": pull(ours(problem, backend), args)}
    if peer := tokamax_name():
        plain = tokamax("xla_chunked")

        def turned(*args):
            return jnp.moveaxis(plain(*head_first(args, problem.H)), 0, 2).reshape(args[2].shape)

        got[f"{peer} xla_chunked"] = pull(turned, args)
    names = ("o", "d_q", "d_k", "d_v", "d_z", "d_beta", "d_A_log", "d_dt_bias")
    return {
        impl: {
            name: float(f"{np.linalg.norm(a - b) / np.linalg.norm(b):.3g}")
            for name, a, b in zip(names, values, want, strict=True)
        }
        for impl, values in got.items()
    }
