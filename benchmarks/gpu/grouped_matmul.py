"""Routed experts on one NVIDIA GPU: the grouped matmul, its gradients and the whole feed-forward.

    python -m benchmarks.gpu.grouped_matmul --out benchmarks/gpu/grouped_matmul.jsonl

Group sizes are drawn as a uniform router would (multinomial), so that tiles are cut as in training. A
case has two floors, measured in the same run: the rate of a dense product of the same widths, and the
bandwidth of a copy for each input read and each result written once; `share` is the larger floor over
the time. Results are compared with ours, which the tests compare with float32. tokamax takes part where
it can be imported; what cannot run, or needs more than 64 GiB of temporary memory, is left out, which is
said. JSON lines, and a table on stdout.
"""

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.layers.feed_forward import ActivationConfig
from k3jax.pallas_kernels.grouped_matmul import composed, experts, grouped_matmul

BF16 = jnp.bfloat16
SITU = ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0)
CASES = {  # experts, rows, latent and hidden width
    "K3, 128 rows per expert": (64, 64 * 128, 3584, 3072),
    "K3, 256 rows per expert": (64, 64 * 256, 3584, 3072),
    "K3, 512 rows per expert": (32, 32 * 512, 3584, 3072),
    "K3, 512 tokens on 1/8 of 896 experts": (112, 112 * 512 * 16 // 896, 3584, 3072),
    "mini, 4 rows of 4096 tokens": (64, 4 * 4096 * 8, 512, 512),
}
MOST_TEMPORARY = 64 * 2**30  # bytes
SECONDS = 0.05  # of queued calls that are timed together
REPEATS = 3
LIMIT = 2e-2  # largest error over largest value


def measure(run: Callable, *args: Any) -> float:
    """Seconds of a call, the median of a few batches of queued ones."""
    jax.block_until_ready(run(*args))
    begin = time.perf_counter()
    jax.block_until_ready(run(*args))
    calls = max(1, min(100, int(SECONDS / (time.perf_counter() - begin))))
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run(*args)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - begin) / calls)
    return statistics.median(found)


@functools.partial(jax.jit, static_argnums=1)
def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, BF16) * shape[-1] ** -0.25


def draw(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def sizes_of(rows: int, groups: int) -> jax.Array:
    drawn = np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups))
    return jnp.asarray(drawn, jnp.int32)


def tokamax() -> Any:
    """tokamax's ragged_dot, or None. Its profiler's package is not needed to run it."""
    if importlib.util.find_spec("tokamax") is None:
        return None
    if importlib.util.find_spec("xprof") is None:
        part = "xprof"
        for name in ("", ".cli", ".tools", ".get_kernel_stats_tool"):
            part += name
            sys.modules[part] = types.ModuleType(part)
        tools: Any = sys.modules["xprof.cli.tools"]
        tools.get_kernel_stats_tool = sys.modules[part]
    return importlib.import_module("tokamax._src.ops.ragged_dot.api")


def matmuls() -> dict[str, Callable]:
    found = {
        name: functools.partial(grouped_matmul, backend=name)
        for name in ("triton_gpu", "blocked", "ragged")
    }
    if (peer := tokamax()) is not None:
        for name in ("triton", "mosaic"):
            found[f"tokamax {name}"] = functools.partial(peer.ragged_dot, implementation=name)
    return found


def phases(matmul: Callable) -> dict[str, Callable]:
    """Forward and both gradients, each by itself: what the others need is not computed."""

    def fwd(x, w, d, sizes):
        return matmul(x, w, sizes)

    def dx(x, w, d, sizes):
        return jax.vjp(lambda x: matmul(x, w, sizes), x)[1](d)[0]

    def dw(x, w, d, sizes):
        return jax.vjp(lambda w: matmul(x, w, sizes), w)[1](d)[0]

    return {"fwd": fwd, "dx": dx, "dw": dw}


def whole(matmul: Callable | None) -> dict[str, Callable]:
    """The experts' feed-forward by the op's own kernels, or out of three grouped matmuls."""

    def call(*args):
        if matmul is None:
            return experts(*args, SITU, backend="triton_gpu")
        return composed.experts(matmul, *args, SITU)

    def fwd(x, w1, w3, w2, p, d, sizes):
        return call(x, w1, w3, w2, p, sizes)

    def both(x, w1, w3, w2, p, d, sizes):
        y, pull = jax.vjp(lambda *args: call(*args, sizes), x, w1, w3, w2, p)
        return y, pull(d)

    return {"fwd": fwd, "fwd+bwd": both}


def error_of(got: Any, want: Any) -> float:
    """Largest error over largest value, of the worst array."""
    errors = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        errors.append(float(jnp.abs(a - b).max() / jnp.abs(b).max()))
    return max(errors)


def prepare(run: Callable, inputs: tuple) -> Callable | str:
    """The compiled call, or why there is none: a peer may not support it."""
    try:
        compiled = jax.jit(run).lower(*inputs).compile()
    except (NotImplementedError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return f"{temporary / 2**30:.0f} GiB temporary" if temporary > MOST_TEMPORARY else compiled


def rates(K: int, N: int) -> tuple[float, float]:
    """FLOP/s of a dense product, bytes/s of a copy."""
    a, b = draw((16384, K), (K, N))
    dense = 2 * 16384 * K * N / measure(jax.jit(jnp.matmul), a, b)
    c = normal(jax.random.key(0), (2**29,))
    return dense, 2 * c.nbytes / measure(jax.jit(jnp.negative), c)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--peers", nargs="*", choices=list(CASES), default=list(CASES))
    args = parser.parse_args()
    packages = ("jax", "triton", "jax-triton")
    about = {"device": jax.devices()[0].device_kind, "dtype": "bfloat16"}
    about |= {name: importlib.metadata.version(name) for name in packages}
    print(about, flush=True)
    wrong = False
    peers = matmuls()
    ours = {"triton_gpu": peers["triton_gpu"]}
    for case in args.cases:
        E, M, K, N = CASES[case]
        implementations = peers if case in args.peers else ours
        sizes, flops, matrices = sizes_of(M, E), 2 * M * K * N, 2 * E * K * N
        dense, copy = rates(K, N)
        print(f"{case}: dense {dense / 1e12:.0f} TFLOP/s, copy {copy / 1e9:,.0f} GB/s", flush=True)
        x, w1, d, w3, w2 = draw((M, K), (E, K, N), (M, N), (E, K, N), (E, N, K))
        runs, moved = [], matrices + 2 * M * (K + N)
        for name, matmul in implementations.items():
            for phase, run in phases(matmul).items():
                runs.append(("matmul", phase, name, run, (x, w1, d, sizes), flops, moved))
        inputs = (x, w1, w3, w2, jax.random.uniform(jax.random.key(5), (M,)), x[::-1], sizes)
        for name in (None, *(("triton_gpu", "blocked") if case in args.peers else ())):
            for phase, run in whole(name and implementations[name]).items():
                passes, latents = (3, 5) if "bwd" in phase else (1, 2)
                moved = passes * 3 * matrices + latents * 2 * M * K
                label = f"three of {name}" if name else "triton_gpu"
                runs.append(("experts", phase, label, run, inputs, 3 * passes * flops, moved))
        with ThreadPoolExecutor() as pool:
            compiled = list(pool.map(lambda r: prepare(r[3], r[4]), runs))
        wanted = {}
        for (op, phase, name, _, inputs, flops_, moved), run in zip(runs, compiled, strict=True):
            row = about | {"case": case, "E": E, "M": M, "K": K, "N": N, "op": op, "phase": phase}
            row |= {"impl": name}
            text = f"{case:36} {op:7} {phase:7} {name:16}"
            if isinstance(run, str):
                row |= {"left_out": run}
                text += f" left out: {run}"
            else:
                wanted.setdefault((op, phase), out := run(*inputs))
                error = error_of(out, wanted[op, phase])
                wrong = wrong or error > LIMIT
                seconds = measure(run, *inputs)
                share = max(flops_ / dense, moved / copy) / seconds
                row |= {"ms": 1e3 * seconds, "tflops": flops_ / seconds / 1e12}
                row |= {"gb_per_s": moved / seconds / 1e9, "share": share, "error": error}
                row |= {"dense_tflops": dense / 1e12, "copy_gb_per_s": copy / 1e9}
                text += (
                    f"{1e3 * seconds:8.3f} ms{flops_ / seconds / 1e12:5.0f} TF/s "
                    f"{flops_ / seconds / dense:4.0%}{moved / seconds / 1e9:6,.0f} GB/s "
                    f"{moved / seconds / copy:4.0%} share {share:4.0%} error {error:.1e}"
                )
            print(text, flush=True)
            if args.out:
                with open(args.out, "a") as out:
                    out.write(json.dumps(row) + "\n")
    if wrong:
        sys.exit(f"an error above {LIMIT}")


if __name__ == "__main__":
    main()
