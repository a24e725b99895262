"""Ops that only move memory, on one NVIDIA GPU: how near they come to the bandwidth of a copy.

    python -m benchmarks.gpu.memory_bound --out benchmarks/gpu/memory_bound.jsonl

Short convolution with SiLU, the mix of Attention Residuals with its norm, SiTU-GLU, the gated norm,
and the decode step of KDA, by every backend that can run. A case counts the bytes that must move:
each input and each result once. Results of the backends of a case are compared, relative to the
first. JSON lines, and a table on stdout.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.layers.norms import gated_rms_norm
from k3jax.pallas_kernels.attention_residuals import attention_residuals
from k3jax.pallas_kernels.kda import kda_step, l2_normalize
from k3jax.pallas_kernels.short_conv import short_conv
from k3jax.pallas_kernels.situ import situ

EPS = 1e-5
CALLS, REPEATS = 20, 5  # queued calls that are timed together, times that this is done
BF16 = jnp.bfloat16
KERNEL_AND_XLA = ("chunked", "triton_gpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    op: str
    problem: str
    phase: str  # fwd, bwd, fwd+bwd
    moved: int  # bytes
    make: Callable[[jax.Array], tuple]  # arguments, of a key
    run: Callable[..., Any]
    backends: tuple[str | None, ...]  # of which `run` takes one as `backend`
    carried: int | None = (
        None  # argument that is donated, and is the first result of the call before
    )


def _normal(key, *shape, dtype: Any = BF16):
    return jax.random.normal(key, shape, dtype)


def copy() -> Case:
    n = 2**29

    def run(x, backend):
        return jnp.copy(x)

    return Case(
        op="copy", problem="1 GiB", phase="fwd", moved=4 * n, backends=(None,),
        make=lambda key: (_normal(key, n),), run=run,
    )  # fmt: skip


def short_conv_cases(B: int, T: int, H: int, K: int, *, documents: bool, norm: bool = False):
    """`norm`: followed by the L2 norm of each head, on its own."""

    def make(key):
        x, dy, kernel = jax.random.split(key, 3)
        ids = 1 + jnp.arange(T, dtype=jnp.int32)[None] * 7 // T + jnp.zeros((B, 1), jnp.int32)
        return (_normal(x, B, T, H, K), _normal(kernel, 4, H, K, dtype=jnp.float32),
                _normal(dy, B, T, H, K), ids)  # fmt: skip

    def forward(x, kernel, dy, ids, backend):
        y, _ = short_conv(x, kernel, segment_ids=ids if documents else None, backend=backend)
        return l2_normalize(y).astype(y.dtype) if norm else y

    def both(x, kernel, dy, ids, backend):
        y, pull = jax.vjp(lambda *a: forward(*a, dy, ids, backend), x, kernel)
        return y, pull(dy)

    name = "short_conv + l2 norm" if norm else "short_conv"
    about = f"{B} x {T} x {H} x {K}" + (", documents" if documents else "")
    for phase, run, passes in (("fwd", forward, 2), ("fwd+bwd", both, 5)):  # x, y; x, dy, dx
        yield Case(
            op=name, problem=about, phase=phase, moved=passes * B * T * H * K * 2,
            make=make, run=run, backends=KERNEL_AND_XLA,
        )  # fmt: skip


def attention_residuals_cases(rows: int, B: int, T: int, D: int):
    def make(key):
        keys = jax.random.split(key, 7)
        bank, prefix, dx, d_bank = (
            _normal(k, *lead, B, T, D)
            for k, lead in zip(keys[:4], ((rows,), (), (), (rows,)), strict=True)
        )
        query, norm, out_norm = (1 + _normal(k, D, dtype=jnp.float32) / 4 for k in keys[4:])
        return bank, prefix, query / D**0.5, norm, out_norm, dx, d_bank

    def mix(bank, prefix, query, norm, out_norm, backend):
        return attention_residuals(
            bank, rows, prefix, query, norm,
            eps=EPS, out_norm=out_norm, out_eps=EPS, backend=backend,
        )  # fmt: skip

    def forward(bank, prefix, query, norm, out_norm, dx, d_bank, backend):
        return mix(bank, prefix, query, norm, out_norm, backend)[0]

    def both(bank, prefix, query, norm, out_norm, dx, d_bank, backend):
        (x, _), pull = jax.vjp(
            functools.partial(mix, backend=backend), bank, prefix, query, norm, out_norm
        )
        d_bank, *others = pull((dx, d_bank))
        return d_bank, others, x

    # Sources and x; then sources, dx, the bank's cotangent read and written, d_prefix.
    sizes = {"fwd": rows + 2, "fwd+bwd": (rows + 2) + (3 * rows + 3)}
    for phase, run in (("fwd", forward), ("fwd+bwd", both)):
        yield Case(
            op="attention_residuals", problem=f"{rows + 1} sources of {B} x {T} x {D}",
            phase=phase, moved=sizes[phase] * B * T * D * 2, make=make, run=run,
            backends=KERNEL_AND_XLA, carried=None if phase == "fwd" else 6,
        )  # fmt: skip


def elementwise_cases(
    name: str, function, rows: int, width: int, backends: tuple[str | None, ...] = (None,)
):
    """`function(a, b, backend)`, whose backward pass reads a and b again."""

    def make(key):
        return tuple(_normal(k, rows, width) for k in jax.random.split(key, 3))

    def forward(a, b, dy, backend):
        return function(a, b, backend)

    def backward(a, b, dy, backend):
        return jax.vjp(functools.partial(function, backend=backend), a, b)[1](dy)

    for phase, run, passes in (("fwd", forward, 3), ("bwd", backward, 5)):
        yield Case(
            op=name, problem=f"{rows} x {width}", phase=phase, moved=passes * rows * width * 2,
            make=make, run=run, backends=backends,
        )  # fmt: skip


def kda_step_case(B: int, H: int, K: int, *, pool: int | None) -> Case:
    def make(key):
        keys = jax.random.split(key, 6)
        q, k, v = (_normal(x, B, H, K) for x in keys[:3])
        g = -jnp.abs(_normal(keys[3], B, H, K, dtype=jnp.float32)) / 10
        beta = jax.nn.sigmoid(_normal(keys[4], B, H, dtype=jnp.float32))
        state = _normal(keys[5], pool or B, H, K, K, dtype=jnp.float32)
        slots = (7 * jnp.arange(B, dtype=jnp.int32)) % (pool or B)  # distinct: 7 divides no pool
        return l2_normalize(q) * K**-0.5, l2_normalize(k), v, g, beta, state, slots

    def run(q, k, v, g, beta, state, slots, backend):
        q, k = q.astype(BF16), k.astype(BF16)
        slots = None if pool is None else slots
        o, state = kda_step(q, k, v, g, beta, state, slots=slots, backend=backend)
        return state, o

    about = f"{B} requests, {H} heads of {K}" + ("" if pool is None else f", pool of {pool}")
    return Case(
        op="kda_step", problem=about, phase="fwd", moved=2 * B * H * K * K * 4, make=make,
        run=run, backends=KERNEL_AND_XLA, carried=5,
    )  # fmt: skip


def cases() -> list[Case]:
    every = [copy()]
    for shape in ((1, 8192, 96, 128), (4, 8192, 16, 128)):
        for documents in (False, True):
            every += short_conv_cases(*shape, documents=documents)
    every += short_conv_cases(1, 8192, 96, 128, documents=False, norm=True)
    every += [kda_step_case(64, 96, 128, pool=pool) for pool in (None, 80)]
    for rows in (1, 4, 8):
        every += attention_residuals_cases(rows, 1, 8192, 7168)
    every += attention_residuals_cases(3, 16, 4096, 1024)

    def activation(a, b, backend):
        return situ(a, b, 4.0, 25.0, backend=backend)

    def gated_norm(a, b, backend):
        return gated_rms_norm(a, jnp.ones(128), b, EPS)

    every += elementwise_cases("situ", activation, 65536, 3072, KERNEL_AND_XLA)
    every += elementwise_cases("gated_rms_norm", gated_norm, 8192 * 96, 128)
    return every


def seconds(run, args: list, carried: int | None) -> list[float]:
    """Of one call, in each repeat."""

    def calls(n):
        for _ in range(n):
            out = run(*args)
            if carried is not None:
                args[carried] = out[0]
        return out

    jax.block_until_ready(calls(3))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(calls(CALLS))
        times.append((time.perf_counter() - begin) / CALLS)
    return times


@jax.jit
def relative_error(got, want) -> jax.Array:
    """The largest of all results, Frobenius norm."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    wide = ((a.astype(jnp.float32), b.astype(jnp.float32)) for a, b in pairs)
    return jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in wide]).max()


def compiled(case: Case, backend: str | None):
    run = functools.partial(case.run, backend=backend)
    donated = () if case.carried is None else (case.carried,)
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    return jax.jit(run, donate_argnums=donated).lower(*shapes).compile()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backends", nargs="*", help="only these; all if omitted")
    parser.add_argument("--only", default="", help="ops whose name contains this")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; stdout if omitted")
    args = parser.parse_args()
    wanted = [c for c in cases() if args.only in c.op or c.op == "copy"]
    jobs = [
        (case, backend)
        for case in wanted
        for backend in case.backends
        if backend is None or not args.backends or backend in args.backends
    ]
    device = jax.devices()[0]
    lines, bandwidth = [], None
    with ThreadPoolExecutor(8) as pool:
        # All before the first is timed: the compiler tries variants on the GPU.
        programs = dict(zip(jobs, pool.map(lambda job: compiled(*job), jobs), strict=True))
    first: dict[Case, Any] = {}
    for (case, backend), run in programs.items():
        values = list(jax.jit(case.make)(jax.random.key(0)))
        result = run(*values)
        error = None
        if case in first:
            error = float(relative_error(result, first[case]))
        else:
            first = {case: result}
        if case.carried is not None:
            values[case.carried] = jnp.copy(result[0])
        del result
        times = seconds(run, values, case.carried)
        del values
        median = statistics.median(times)
        rate = case.moved / median / 1e9
        bandwidth = bandwidth or rate
        line = {
            "op": case.op, "problem": case.problem, "phase": case.phase,
            "backend": backend or "xla", "dtype": "bfloat16",
            "ms": round(1e3 * median, 4), "spread_ms": round(1e3 * (max(times) - min(times)), 4),
            "gb_per_s": round(rate), "of_copy": round(rate / bandwidth, 3),
            "relative_error": error, "temporary_mib": _temporary(run),
            "device": device.device_kind, "jax": jax.__version__,
        }  # fmt: skip
        lines.append(line)
        print(
            f"{case.op:22} {case.problem:36} {case.phase:8} {line['backend']:11}"
            f" {line['ms']:8.4f} ms {line['gb_per_s']:6} GB/s {100 * line['of_copy']:5.1f} %"
            + (f"  err {error:.1e}" if error is not None else ""),
            flush=True,
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")


def _temporary(run) -> float:
    return round(run.memory_analysis().temp_size_in_bytes / 2**20, 1)


if __name__ == "__main__":
    main()
