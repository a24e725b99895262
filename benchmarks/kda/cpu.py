"""The chunked backend of KDA on a CPU by chunk size, next to tokamax where that is importable.

    uv run --with tokamax==0.0.17 python benchmarks/kda/cpu.py [rounds]
    uv run python benchmarks/kda/cpu.py --memory [tokens]

float32; raw q, k, v and decay logits go in on both sides, so L2 norm and the bounded gate are
included. Results are compared first. The programs take turns, so that all meet the same load;
times are milliseconds, wall and CPU time of all threads: quickest, lower quartile, median, upper
quartile. One JSON line per program. `--memory` compiles forward and backward for one head of
bfloat16, K = V = 128, and runs nothing: what the compiler then reserves.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas_kernels.kda import kda, kda_from_logits
from k3jax.pallas_kernels.kda.bench_cases import G_MIN, tokamax
from k3jax.pallas_kernels.kda.gates import l2_normalize, log_decay, normalize_query

SHAPES = ((1, 2048, 4, 128), (8, 256, 4, 32))  # B, T, H, K = V; the second is that of `nano`


class Program(NamedTuple):
    """One implementation: its name, its function and its arguments."""

    name: str
    call: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]


def make_args(B: int, T: int, H: int, K: int) -> tuple[jax.Array, ...]:
    """q, k, v, decay logits, beta, A_log, dt_bias."""
    keys = jax.random.split(jax.random.key(0), 7)
    q, k, v, z = (jax.random.normal(key, (B, T, H, K)) for key in keys[:4])
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, H)))
    return q, k, v, z, beta, jax.random.uniform(keys[5], (H,)), jax.random.uniform(keys[6], (H, K))


def ours(chunk_size: int) -> Callable[..., jax.Array]:
    def call(q, k, v, z, beta, A_log, dt_bias):
        settings = dict(g_min=G_MIN, chunk_size=chunk_size, backend="chunked")
        return kda_from_logits(q, k, v, z, beta, A_log, dt_bias, **settings)[0]

    return call


def ours_without_promise(q, k, v, z, beta, A_log, dt_bias):
    """The same decays, but the op is not told their bound."""
    g = log_decay(z + dt_bias, A_log, G_MIN)
    return kda(normalize_query(q), l2_normalize(k), v, g, beta, backend="chunked")[0]


def recurrence(q, k, v, z, beta, A_log, dt_bias):
    """The definition, token by token."""
    return kda_from_logits(q, k, v, z, beta, A_log, dt_bias, g_min=G_MIN, backend="reference")[0]


def programs(args: tuple[jax.Array, ...]) -> list[Program]:
    found = [Program(f"chunked, C = {C}", ours(C), args) for C in (16, 32, 64, 128)]
    found.append(Program("chunked, C = 64, no g_min", ours_without_promise, args))
    found.append(Program("reference", recurrence, args))
    if importlib.util.find_spec("tokamax"):
        heads_first = tuple(jnp.moveaxis(x, 2, 0) for x in args[:5])
        turned = (*heads_first, args[5], args[6].reshape(-1))
        found.append(Program("tokamax xla_chunked", tokamax("xla_chunked"), turned))
    return found


def spread(seconds: list[float]) -> list[float]:
    return [round(float(x), 2) for x in np.quantile(seconds, (0, 0.25, 0.5, 0.75)) * 1e3]


def measure(shape: tuple[int, int, int, int], rounds: int) -> None:
    args = make_args(*shape)
    runs, want = [], None
    for program in programs(args):
        # v serves as the gradient of the outputs.
        def both(*args, call=program.call):
            return jax.vjp(call, *args)[1](args[2])

        record: dict = {"impl": program.name, "shape": dict(zip("BTHK", shape, strict=True))}
        for name, function in (("forward", program.call), ("both", both)):
            begin = time.perf_counter()
            lowered = jax.jit(function).lower(*program.args)
            traced = time.perf_counter()
            compiled = lowered.compile()
            done = time.perf_counter()
            record[name] = {
                "trace_s": round(traced - begin, 2),
                "compile_s": round(done - traced, 2),
                "lines": len(lowered.as_text().splitlines()),
                "temporary_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
            }
            runs.append((record, name, compiled, program.args))
        o = np.asarray(runs[-2][2](*program.args))
        o = o if program.args is args else np.moveaxis(o, 0, 2)
        want = o if want is None else want
        record["difference"] = float(np.abs(o - want).max() / np.abs(want).max())
        if record["difference"] > 1e-4:
            sys.exit(f"{program.name} differs by {record['difference']}: nothing is measured")

    times = {id(run): ([], []) for run in runs}
    for _ in range(rounds):
        for run in runs:
            _, _, compiled, arguments = run
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(compiled(*arguments))
            times[id(run)][0].append(time.perf_counter() - wall)
            times[id(run)][1].append(time.process_time() - cpu)
    for run in runs:
        record, name, _, _ = run
        wall, cpu = times[id(run)]
        record[name] |= {"wall_ms": spread(wall), "cpu_ms": spread(cpu)}
    installed = {x.metadata["Name"] for x in importlib.metadata.distributions()}
    packages = installed & {"jax", "jaxlib", "tokamax"}
    versions = {name: importlib.metadata.version(name) for name in sorted(packages)}
    cores = len(os.sched_getaffinity(0))
    for record in {id(run[0]): run[0] for run in runs}.values():
        print(json.dumps(record | {"cores": cores, "versions": versions}), flush=True)


def memory(T: int) -> None:
    """What one head of bfloat16 needs for T tokens, forward and backward."""
    q, k, v, z, beta, *gate = jax.eval_shape(lambda: make_args(1, T, 1, 128))
    q, k, v, z = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k, v, z))

    def both(*args):
        o, pull = jax.vjp(ours(64), *args)
        return o, pull(args[2])

    begin = time.perf_counter()
    found = jax.jit(both).lower(q, k, v, z, beta, *gate).compile().memory_analysis()
    sizes = {n: getattr(found, f"{n}_size_in_bytes") for n in ("argument", "output", "temp")}
    sizes["total"] = sum(sizes.values())
    record = {"T": T, "H": 1, "K": 128, "V": 128, "dtype": "bfloat16"}
    record |= {f"{name}_gib": round(size / 2**30, 3) for name, size in sizes.items()}
    print(json.dumps(record | {"compile_s": round(time.perf_counter() - begin, 1)}))


def floor(rounds: int) -> None:
    """What XLA's batched matmul reaches here: 128 x [64, 128] x [128, 128]."""
    a, b = jnp.ones((128, 64, 128)), jnp.ones((128, 128, 128))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    seconds = []
    for _ in range(3 * rounds):
        begin = time.perf_counter()
        jax.block_until_ready(product(a, b))
        seconds.append(time.perf_counter() - begin)
    best = 2 * a.size * 128 / min(seconds) / 1e9
    print(json.dumps({"floor": "128 x [64, 128] x [128, 128]", "gflops": round(best, 1)}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        memory(int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 20)
        sys.exit()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    floor(rounds)
    for shape in SHAPES:
        measure(shape, rounds)
