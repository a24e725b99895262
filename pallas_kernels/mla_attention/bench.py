"""Measures MLA's attention: `python -m k3jax.pallas_kernels.mla_attention.bench`.

Correctness first: the interpreted kernels on a small case, against the definition. Then estimates
from the compiled program (`tpu_cost`), not timings: a line of JSON each, and a table on stderr.
Beside ours stand splash attention as jax and tokamax have it, on causal rows of the same length.

The profiler cannot follow a triangle: it does not know where a row of it ends. So both sides are
estimated on rectangles of block pairs that make up the same number of pairs, rows and diagonals:

    ours    the mean of two grids, whose rows have floor and ceil of the triangle's mean number of
            pairs, each row with one on the diagonal; without the loop that would run the exact
            kernel, which does not run
    splash  a full mask over half as many tokens, times causal pairs / full pairs: no pair pays for
            a mask, which is in its favour

A step of decoding is estimated for requests that fill their pages: the profiler does not know lengths.
"""

import functools
import importlib
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.mla_attention import (
    mla_attention,
    mla_decode,
    pairs,
    pallas_tpu,
    tpu_backward,
    tpu_decode,
    tpu_forward,
    tpu_pairs,
)
from k3jax.pallas_kernels.mla_attention.tpu_grid import block_size
from k3jax.pallas_kernels.tpu_cost import CHIPS, TOPOLOGIES, estimate
from k3jax.pallas_kernels.tpu_cost.compare import Case, compare, floors, show, summary

MODULE = "k3jax.pallas_kernels.mla_attention.bench"
N, R, V, RANK = 128, 64, 128, 512  # K3's widths
ROW = 640  # channels of a cache row, of which RANK + R are used
SCALE = (N + R) ** -0.5
PEER_BLOCK = 1024
SHARE = 2  # of the rows of block pairs, one in this many is estimated
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def _rectangle(module, rows: int, width: int, *, transposed: bool) -> None:
    """Gives the kernels of `module` a grid of rows with `width` pairs each."""

    def unfold(n, r, c):  # of keys, row i stands for block n - 1 - i
        return n - 1 - r if transposed else r, c, c == width - 1

    module.unfold, module.folded = unfold, lambda n: (rows, width)


def ours(T: int, H: int, backward: bool, up: bool, dtype: str = "bfloat16") -> Program:
    """The op from token-major arrays, on the rectangle with rows rounded `up` or down."""
    block = block_size(T, jnp.dtype(dtype))
    sizes = tpu_forward.Sizes(
        n=T // block, block=block, N=N, R=R, V=V, scale=SCALE, segmented=False
    )
    rounded, tokens = math.ceil if up else math.floor, T // SHARE
    for module, largest in ((tpu_forward, block), (tpu_backward, tpu_backward.LARGEST_BLOCK)):
        sizes = sizes.within(largest)
        width = rounded((sizes.n + 1) / 2)
        _rectangle(module, tokens // sizes.block, width, transposed=module is tpu_backward)
    pallas_tpu._checked = functools.partial(tpu_forward.forward, exact=False)

    def run(q, k, k_shared, v):
        return mla_attention(q, k, k_shared, v, scale=SCALE, backend="pallas_tpu")[0]

    x = (1, tokens, H)
    shapes = ((*x, N + R), (*x, N), (1, tokens, R), (*x, V))
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return _with_gradients(run, arrays, jax.ShapeDtypeStruct((*x, V), jnp.float32), backward)


def splash(
    package: str, T: int, H: int, backward: bool, Q: int = N + R, dtype: str = "bfloat16"
) -> Program:
    """Splash attention with a full mask, head-major as it wants it."""
    size = min(PEER_BLOCK, T)
    blocks = {
        "block_q": size, "block_kv": size, "block_kv_compute": size // 2, "block_q_dkv": size,
        "block_kv_dkv": size, "block_kv_dkv_compute": size // 2, "use_fused_bwd_kernel": True,
    }  # fmt: skip
    if package == "jax":
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as s
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        mask = masks.MultiHeadMask([masks.FullMask((T, T))] * H)
        kernel = s.make_splash_mha(
            mask, block_sizes=s.BlockSizes(**blocks), head_shards=1, q_seq_shards=1
        )
    else:
        package = "tokamax._src.ops.experimental.tpu.splash_attention."
        s = importlib.import_module(package + "splash_attention_kernel")
        m = importlib.import_module(package + "splash_attention_mask")
        config = s.SplashConfig(**blocks)
        kernel = s.make_splash_mha(m.FullMask((T, T)), config=config, q_seq_shards=1)
    shapes = ((H, T, Q), (H, T, Q), (H, T, V))
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    def run(q, k, v):
        return kernel(q, k, v)

    return _with_gradients(run, arrays, jax.ShapeDtypeStruct((H, T, V), dtype), backward)


def _with_gradients(run, arrays, d_o, backward) -> Program:
    def both(arrays, d_o):
        o, pull = jax.vjp(run, *arrays)
        return o, pull(d_o)

    return (both, (arrays, d_o)) if backward else (run, arrays)


def decoding(B: int, H: int, tokens: int, page: int, q_dtype: str) -> Program:
    """A decoding step of `B` requests of `tokens` each, cache rows padded to whole lanes."""
    tpu_decode._left = lambda length, before: tokens
    q = jax.ShapeDtypeStruct((B, H, RANK + R), q_dtype)
    pages = jax.ShapeDtypeStruct((B * tokens // page, page, ROW), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((B, tokens // page), jnp.int32)
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)

    def step(*args):
        return mla_decode(*args, scale=SCALE, kv_rank=RANK, backend="pallas_tpu")

    return step, (q, pages, table, lengths)


def pair_of_chunks(T: int, H: int, backward: bool, dtype: str = "bfloat16") -> Program:
    """What a chunk of `T` keys adds for queries of a later one, all of one document."""
    tpu_pairs._visit = lambda step, active, several: step(masked=False)
    block = block_size(T, jnp.dtype(dtype))
    sizes = tpu_forward.Sizes(n=T // block, block=block, N=N, R=R, V=V, scale=SCALE, segmented=True)
    like = jax.ShapeDtypeStruct
    queries = like((1, H, N + R, T), dtype)
    keys = tuple(like((1, T, *x), dtype) for x in ((H, N), (R,), (H, V)))
    o, ids = like((1, T, H * V), jnp.float32), like((1, T), jnp.int32)
    numbers = like((1, H, tpu_forward.STATS, T), jnp.float32)

    def forward(qT, keys, ids, before):
        k, k_shared, v = keys
        return tpu_pairs.forward(sizes, qT, k, k_shared, v, ids, ids, before, exact=False)

    def gradients(qT, doT, keys, numbers, ids, dq):
        k, k_shared, v = keys
        more, *of_keys = tpu_pairs.gradients(sizes, qT, doT, k, k_shared, v, numbers, ids, ids)
        return dq + more, of_keys

    if not backward:
        return forward, (queries, keys, ids, (o, numbers))
    size = min(block, tpu_backward.LARGEST_BLOCK)
    dq = like((1, H, T // size, N + R, size), jnp.float32)
    return gradients, (queries, like((1, H, V, T), dtype), keys, numbers, ids, dq)


def pair_of_blocks(T: int, H: int, backward: bool, dtype: str = "bfloat16") -> Program:
    """The same in plain JAX for one of its blocks of `T` queries and as many keys."""
    like = jax.ShapeDtypeStruct
    queries = like((1, 1, T, H, N + R), dtype)
    d_o, numbers = like((1, 1, T, H, V), dtype), like((1, 1, H, T), jnp.float32)
    keys = tuple(like((1, T, *x), dtype) for x in ((H, N), (R,), (H, V)))

    def row(keys, ids):
        none, once = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)
        return pairs.Row(lambda j: keys, SCALE, ids, 1, (none[0], once[0], none, once))

    def forward(q, keys, ids):
        return pairs.Blocks.forward(q, row(keys, ids))

    def gradients(q, d_o, m, delta, keys, ids):
        add = lambda carry, j, *grads: grads  # noqa: E731
        zeros = tuple(
            jnp.zeros(x.shape, t) for x, t in zip(keys, (dtype, "float32", dtype), strict=True)
        )
        return pairs.Blocks.backward(q, d_o, m, delta, row(keys, ids), add, zeros)

    ids = like((2, 1, T), jnp.int32)
    if not backward:
        return forward, (queries, keys, ids)
    return gradients, (queries, d_o, numbers, numbers, keys, ids)


def pair_cases(T: int, H: int, measured: int, backward: bool) -> list[Case]:
    """A chunk of keys for a later chunk of queries: by the kernels, and by blocks in plain JAX."""
    of_queries = T * H * ((N + R) * 2 + V * (6 if backward else 8) + (N + R) * 8 * backward)
    of_keys = T * (H * (N + V) + R) * 2 * (1 + backward)
    common = {
        "op": "mla_pairs",
        "problem": {"B": 1, "T": T, "H": H, "dtype": "bfloat16", "pass": "bwd" if backward else "fwd"},
        "flops": H * T * T * 2 * ((3 * (N + R) + 2 * V) if backward else (N + R + V)),
        "moved": of_queries + of_keys,
    }  # fmt: skip
    block = 512
    return [
        Case(
            **common, impl="k3jax pallas_tpu", target=f"{MODULE}:pair_of_chunks",
            kwargs={"T": T, "H": measured, "backward": backward}, repeats=H / measured,
        ),
        Case(
            **common, impl="k3jax blocks", target=f"{MODULE}:pair_of_blocks",
            kwargs={"T": block, "H": H, "backward": backward}, repeats=(T / block) ** 2,
        ),
    ]  # fmt: skip


def check() -> None:
    """Raises unless the interpreted kernels give the definition's outputs."""
    draw = np.random.default_rng(0)
    x = (1, 300, 1)
    shapes = ((*x, N + R), (*x, N), (1, 300, R), (*x, V))
    arrays = [jnp.asarray(draw.normal(size=s), jnp.bfloat16) for s in shapes]

    def run(backend, *arrays):
        def loss(*arrays):
            o, _ = mla_attention(*arrays, scale=SCALE, backend=backend)
            return (o * jnp.cos(jnp.arange(V))).sum(), o

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(*arrays)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        (_, o), grads = run("pallas_tpu", *arrays)
    (_, want_o), want = run("reference", *[a.astype(jnp.float32) for a in arrays])
    for a, b in zip((o, *grads), (want_o, *want), strict=True):
        error = jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)
        if not error < 2e-2:
            raise SystemExit(f"the kernels are wrong: relative error {error}")


def attention_cases(
    T: int, H: int, measured: int, backward: bool, widths: tuple[int, ...]
) -> list[list[Case]]:
    """Cases whose mean is one measurement; `measured` of the heads are compiled."""
    pairs = H * T * T / 2
    flops = pairs * 2 * ((N + R + V) + backward * (3 * (N + R) + 2 * V))
    tokens = H * (N + R + N + V) * 2 + R * 2  # of q, k, v, k_shared, a token
    moved = T * (tokens + 4 * H * V) + backward * T * (2 * tokens + 8 * H * V)
    problem = {
        "B": 1,
        "T": T,
        "H": H,
        "dtype": "bfloat16",
        "pass": "fwd+bwd" if backward else "fwd",
    }
    common = {"op": "mla_attention", "flops": flops, "moved": moved}
    kwargs = {"H": measured, "backward": backward}
    found = [
        [
            Case(
                **common, impl="k3jax pallas_tpu", problem=problem | {"Q": N + R, "V": V},
                target=f"{MODULE}:ours", kwargs=kwargs | {"T": T, "up": up},
                repeats=SHARE * H / measured,
            )
            for up in (False, True)
        ]
    ]  # fmt: skip
    half, blocks = T // 2, T / PEER_BLOCK
    times = H / measured * (blocks * (blocks + 1) / 2) / (half / PEER_BLOCK) ** 2
    for package in ("jax", "tokamax"):
        for Q in widths:
            found.append([
                Case(
                    **common, impl=f"{package} splash", problem=problem | {"Q": Q, "V": V},
                    target=f"{MODULE}:splash",
                    kwargs=kwargs | {"package": package, "T": half, "Q": Q}, repeats=times,
                )
            ])  # fmt: skip
    return found


def decoding_case(B: int, tokens: int, page: int, q_dtype: str, H: int = 96) -> list[Case]:
    return [
        Case(
            op="mla_decode", impl="k3jax pallas_tpu",
            problem={"B": B, "T": tokens, "H": H, "page": page, "q": q_dtype, "pass": "decode"},
            target=f"{MODULE}:decoding",
            kwargs={"B": B, "H": H, "tokens": tokens, "page": page, "q_dtype": q_dtype},
            flops=B * tokens * H * 2 * (RANK + R + RANK), moved=B * tokens * (RANK + R) * 2,
        )
    ]  # fmt: skip


def _record(case: Case, chip: str, simulate: bool) -> dict[str, Any]:
    """An estimate. Of a kernel with branches the profiler's count, which knows which are taken, where
    it follows them: not the floors of the whole code, which count all."""
    record = {"op": case.op, "impl": case.impl, "chip": chip, **case.problem}
    ours = case.impl.startswith("k3jax")
    # Of splash attention the profiler skips what depends on its tables; bundles are what counts.
    simulate = simulate and ours
    report = estimate(case.target, TOPOLOGIES[chip], case.kwargs, simulate=simulate)
    if "error" in report:
        return record | {"error": report["error"][:300]}
    facts = CHIPS[report["device_kind"]]

    def us(op):
        if op["op"] == "pallas" and op["sim_cycles"]:
            return op["sim_cycles"] / facts.clock * 1e6
        return op["us"]

    kernels = [op for op in report["ops"] if op["op"] == "pallas"]
    floor = floors(facts, case.flops, case.moved)
    found = summary(report)
    total = sum(us(op) * op["runs"] for op in report["ops"]) * case.repeats
    return record | {
        "device": found["device"],
        "versions": found["versions"],
        "us": round(total, 1),
        "pallas_us": round(sum(map(us, kernels)) * case.repeats, 1),
        "kernels": {op["name"]: round(us(op) * case.repeats, 1) for op in kernels},
        "profiled": all(op["sim_cycles"] for op in kernels),
        "spills": sum(op["spills"] for op in kernels),
        "temp_bytes": report["memory"]["temp"],
        "compile_s": found["compile_s"],
        "floor_us": floor,
        "of_floor": round(max(floor.values()) / total, 3),
        "kernel_of_floor": round(max(floor.values()) / (sum(map(us, kernels)) * case.repeats), 3),
    }


def _mean(records: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [r for r in records if "error" in r]
    if failed:
        return failed[0]
    record = dict(records[0])
    for name in ("us", "pallas_us"):
        record[name] = round(sum(r[name] for r in records) / len(records), 1)
    floor = max(record["floor_us"].values())
    record["of_floor"] = round(floor / record["us"], 3)
    record["kernel_of_floor"] = round(floor / record["pallas_us"], 3)
    record["kernels"] = {
        name: round(sum(r["kernels"][name] for r in records) / len(records), 1)
        for name in record["kernels"]
    }
    return record


def measure(
    measurements: Iterable[list[Case]], chips: Iterable[str], simulate: bool = True
) -> list[dict[str, Any]]:
    records = []
    for chip in chips:
        for cases in measurements:
            records.append(_mean([_record(case, chip, simulate) for case in cases]))
            print(json.dumps(records[-1]), flush=True)
    show(records)
    return records


def main(
    chips: tuple[str, ...] = ("v5e", "v5p", "v6e", "tpu7x"),
    tokens: tuple[int, ...] = (8192,),
    heads: int = 8,
    measured_heads: int = 1,
    passes: tuple[str, ...] = ("fwd", "fwd+bwd", "decode", "pairs"),
    chunks: tuple[int, ...] = (8192,),
    peer_widths: tuple[int, ...] = (N + R, N),
    simulate: bool = True,
) -> None:
    """Estimates of our kernels and of splash attention.

    Args:
        chips: v5e, v5p, v6e, tpu7x.
        tokens: lengths of the row.
        heads: of the problem.
        measured_heads: of the programs that are compiled; the rest is multiplied.
        passes: fwd, fwd+bwd, decode; pairs of chunks, as rows split over devices have them.
        chunks: tokens of those, of which there are 96 heads.
        peer_widths: channels of q and k that splash attention is estimated for; none: not at all.
        simulate: False counts instructions without latencies, all branches taken.
    """
    check()
    measurements: list[list[Case]] = []
    for T in tokens:
        for backward in (False, True):
            if ("fwd", "fwd+bwd")[backward] in passes:
                measurements += attention_cases(T, heads, measured_heads, backward, peer_widths)
    if "decode" in passes:
        measurements += [
            decoding_case(8, 8192, 64, "bfloat16"),
            decoding_case(8, 8192, 64, "float32"),
            decoding_case(8, 8192, 256, "bfloat16"),
        ]
    if measurements:
        measure(measurements, chips, simulate)
    if "pairs" in passes:
        cases = [c for T in chunks for b in (False, True) for c in pair_cases(T, 96, 1, b)]
        compare(cases, chips, simulate=simulate)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
