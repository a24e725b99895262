"""The attention of gated MLA on one NVIDIA GPU, beside cuDNN's flash attention.

    python -m benchmarks.gpu.mla_attention --out benchmarks/gpu/mla_attention.jsonl

Forward, and forward with backward, bfloat16: rows of one document, and rows packed with documents of
about 1000 tokens. Correctness first: the kernels against the definition, in a case that has both.
cuDNN takes one width for queries, keys and values and no documents, so its peers get the keys of
each head expanded and the values padded with zeros to 192 channels beforehand, untimed; a second
one has 128 channels everywhere. TFLOP/s count the products of causal pairs inside documents, at the
widths that are needed: (Q + V) multiplications and additions forward, 3.5 times that with backward.
JSON lines, and a table on stdout.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.memory_bound import relative_error, seconds
from k3jax.pallas_kernels.mla_attention import mla_attention

N, R, V = 128, 64, 128  # K3's widths
SCALE = (N + R) ** -0.5
SHAPES = ((1, 8192, 16), (4, 2048, 16), (1, 32768, 8), (1, 8192, 96))  # B, T, H
DOCUMENT = 1000  # mean length of packed documents, tokens
LIMIT = 5e-3  # relative error of bfloat16
BF16 = jnp.bfloat16


@dataclass(frozen=True, kw_only=True)
class Program:
    name: str
    shape: tuple[int, int, int]
    documents: bool
    phase: str  # fwd, fwd+bwd
    tflop: float
    make: Callable[[], tuple]  # arguments
    run: Callable[..., Any]


def segment_ids(B: int, T: int) -> np.ndarray:
    """Documents of 500 to 1500 tokens, in rows without padding."""
    draw = np.random.default_rng(0)
    ends = np.cumsum(
        draw.integers(DOCUMENT // 2, DOCUMENT * 3 // 2, size=(B, 4 * T // DOCUMENT)), 1
    )
    return (1 + (np.arange(T)[None, :, None] >= ends[:, None]).sum(-1)).astype(np.int32)


def pairs(ids: np.ndarray) -> float:
    """Pairs of tokens that attend, as T^2 / 2 counts them for one document."""
    lengths = [np.unique(row, return_counts=True)[1].astype(float) for row in ids]
    return sum((x**2).sum() / 2 for x in lengths)


def inputs(B: int, T: int, H: int) -> tuple[jax.Array, ...]:
    """q, k, k_shared, v and d_o."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((B, T, H, N + R), (B, T, H, N), (B, T, R), (B, T, H, V))
    arrays = [jax.random.normal(key, s, BF16) for key, s in zip(keys[:4], shapes, strict=True)]
    return *arrays, jax.random.normal(keys[4], (B, T, H, V))


def ours(ids: np.ndarray | None, backend: str) -> dict[str, Callable]:
    def forward(q, k, k_shared, v, d_o):
        return mla_attention(
            q, k, k_shared, v, scale=SCALE, segment_ids=ids, backend=backend
        )  # fmt: skip

    def both(*arrays):
        (o, top), pull = jax.vjp(lambda *x: forward(*x, None), *arrays[:4])
        return o, top, pull((arrays[4], jnp.zeros_like(top)))

    return {"fwd": forward, "fwd+bwd": both}


def cudnn() -> dict[str, Callable]:
    def forward(q, k, v, d_o):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    def both(q, k, v, d_o):
        o, pull = jax.vjp(lambda *x: forward(*x, None), q, k, v)
        return o, pull(d_o.astype(o.dtype))

    return {"fwd": forward, "fwd+bwd": both}


def expanded(B: int, T: int, H: int, width: int) -> tuple[jax.Array, ...]:
    """q, k, v and d_o of one width for cuDNN: 192, or 128 without the shared channels."""
    q, k, k_shared, v, d_o = inputs(B, T, H)
    if width == N:
        return q[..., :N], k, v, d_o
    shared = jnp.broadcast_to(k_shared[:, :, None], (B, T, H, R))
    wider = ((0, 0), (0, 0), (0, 0), (0, R))
    return q, jnp.concatenate([k, shared], -1), jnp.pad(v, wider), jnp.pad(d_o, wider)


def programs(shapes) -> Iterator[Program]:
    for B, T, H in shapes:
        for documents in (False, True):
            ids = segment_ids(B, T) if documents else None
            count = pairs(np.ones((B, T), np.int32) if ids is None else ids) * H / 1e12
            rows: list[tuple[str, int, Callable, dict]] = [
                ("triton_gpu", N + R + V, lambda s=(B, T, H): inputs(*s), ours(ids, "triton_gpu"))
            ]
            if not documents:
                for width in (N + R, N):
                    rows.append((
                        f"cudnn, {width} wide", width + V,
                        lambda s=(B, T, H), width=width: expanded(*s, width), cudnn(),
                    ))  # fmt: skip
            for name, widths, make, phases in rows:
                for phase, run in phases.items():
                    tflop = 2 * widths * count * {"fwd": 1, "fwd+bwd": 3.5}[phase]
                    yield Program(
                        name=name, shape=(B, T, H), documents=documents, phase=phase,
                        tflop=tflop, make=make, run=run,
                    )  # fmt: skip


def check() -> float:
    """Largest error of outputs and gradients, against the definition in float32."""
    arrays = inputs(2, 1111, 3)
    ids = segment_ids(2, 1111)
    ids[1, :40] = 0
    ids[:, -90:] = 0
    with jax.default_matmul_precision("highest"):
        want = jax.jit(ours(ids, "reference")["fwd+bwd"])(*(x.astype("float32") for x in arrays))
    error = float(relative_error(jax.jit(ours(ids, "triton_gpu")["fwd+bwd"])(*arrays), want))
    if not error < LIMIT:
        raise ValueError(f"the kernels are wrong: relative error {error}, limit {LIMIT}")
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="only the first so many")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; stdout if omitted")
    args = parser.parse_args()
    error = check()
    print(f"relative error of outputs and gradients: {error:.1e}")

    def compiled(program: Program):
        return jax.jit(program.run).lower(*jax.eval_shape(program.make)).compile()

    every = list(programs(SHAPES[: args.shapes]))
    with ThreadPoolExecutor(8) as pool:
        ready = list(pool.map(compiled, every))
    lines = []
    for program, run in zip(every, ready, strict=True):
        times = seconds(run, list(program.make()), None)
        median = statistics.median(times)
        B, T, H = program.shape
        line = {
            "op": "mla_attention", "backend": program.name, "B": B, "T": T, "H": H, "N": N, "R": R,
            "V": V, "dtype": "bfloat16", "documents": program.documents, "phase": program.phase,
            "ms": round(1e3 * median, 4), "spread_ms": round(1e3 * (max(times) - min(times)), 4),
            "tflop_per_s": round(program.tflop / median),
            "temporary_mib": round(run.memory_analysis().temp_size_in_bytes / 2**20, 1),
            "relative_error": error, "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        }  # fmt: skip
        lines.append(line)
        about = f"{B} x {T} x {H}" + (f", documents of {DOCUMENT}" if program.documents else "")
        print(
            f"{about:34} {program.phase:8} {program.name:16} {line['ms']:9.3f} ms"
            f" {line['tflop_per_s']:5} TFLOP/s {line['temporary_mib']:8} MiB",
            flush=True,
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if args.out:
        args.out.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
