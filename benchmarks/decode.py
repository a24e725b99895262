"""Speed of generation: tokens per second, and how near the memory's bandwidth a step comes.

    uv run python benchmarks/decode.py            # `mini`, random weights, bfloat16, contexts of 1,024
    uv run python benchmarks/decode.py --cpu      # `nano`: the engine beside a loop without a cache

A JSON line per case, and a table on stderr. What a step must read at least: every weight that takes
part, of the routed experts only those that some token of the batch chose (their number expected of
uniform choices, E (1 - (1 - A/E)^B)), the head, the memories of the KDA layers read and written, and
the latents of all tokens before. The bandwidth is that of a copy, measured here.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from k3jax.configs import preset
from k3jax.generate import Engine, compute_weights
from k3jax.model import K3Config
from k3jax.request import Request
from k3jax.sample import SamplingConfig
from k3jax.train_state import abstract_model, init_params, merge

GREEDY = SamplingConfig(temperature=0.0)


def device() -> dict[str, Any]:
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__}


def copy_bandwidth(size: int) -> float:
    """Bytes per second that a copy of `size` bytes reads and writes, the best of ten."""
    copy = jax.jit(lambda x: x + 1)
    x = jnp.zeros(size // 4, jnp.float32)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        copy(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * x.nbytes / best


def step_bytes(cfg: K3Config, params: Any, batch: int, context: int) -> dict[str, float]:
    """Bytes of one step for `batch` requests of `context` tokens, by kind."""
    assert cfg.moe is not None
    experts, others = 0, 0
    for path, x in jax.tree_util.tree_leaves_with_path(compute_weights(cfg, params)):
        names = [part.key for part in path]
        if "experts" in names:
            experts += x.nbytes
        elif "embed_tokens" not in names or cfg.tie_embeddings:
            others += x.nbytes
    rate = cfg.moe.num_active / cfg.moe.num_experts
    kinds = [attention for attention, _ in cfg.layers]
    memory = cfg.kda.num_heads * cfg.kda.head_dim**2 * 4
    width = (cfg.mla.kv_rank + cfg.mla.qk_shared_dim) * jnp.dtype(cfg.dtype).itemsize
    return {
        "weights": others,
        "experts": experts * (1 - (1 - rate) ** batch),
        "memories": 2 * batch * memory * kinds.count("kda"),
        "latents": batch * context * width * kinds.count("mla"),
    }


def measure(cfg: K3Config, params: Any, buffers: Any, batch: int, context: int, steps: int) -> dict:
    """Tokens per second of `batch` requests that meet at `context` tokens."""
    engine = Engine(cfg, params, buffers, None, slots=batch, max_len=context + steps)
    draw = np.random.default_rng(0).integers(0, cfg.vocab_size, (2 * batch, context))
    for half in (draw[:batch], draw[batch:]):  # the first compiles, and is not counted
        engine.stats = type(engine.stats)()
        engine.generate(
            [Request(prompt=row.tolist(), max_tokens=steps, sampling=GREEDY) for row in half]
        )
    stats = engine.stats
    seconds = stats.generated_seconds / (stats.timed_generated / batch)
    return {
        "batch": batch,
        "context": context,
        "decode_tokens_per_s": stats.timed_generated / stats.generated_seconds,
        "prefill_tokens_per_s": stats.timed_prompt / stats.prompt_seconds,
        "step_ms": 1e3 * seconds,
        "state_bytes": engine.state_bytes,
    }


def accelerator(batches: list[int], context: int, steps: int, name: str) -> None:
    cfg = preset(name)().model
    cfg = replace(cfg, dtype="bfloat16")
    params, buffers = init_params(cfg, jax.random.key(0))
    bandwidth = copy_bandwidth(2**32 if jax.default_backend() != "cpu" else 2**28)
    rows = []
    for batch in batches:
        row = {"model": name} | measure(cfg, params, buffers, batch, context, steps) | device()
        parts = step_bytes(cfg, params, batch, context + steps // 2)
        floor = sum(parts.values()) / bandwidth
        row |= {f"{kind}_bytes": round(size) for kind, size in parts.items()}
        row |= {"bandwidth": bandwidth, "floor_ms": 1e3 * floor}
        row["share_of_floor"] = row["floor_ms"] / row["step_ms"]
        print(json.dumps(row), flush=True)
        rows.append(row)
    show(
        f"{name}, contexts of {context}, {device()}, copies at {bandwidth / 1e9:,.0f} GB/s",
        rows,
        (
            "batch",
            "decode_tokens_per_s",
            "prefill_tokens_per_s",
            "step_ms",
            "floor_ms",
            "share_of_floor",
        ),
    )


def without_cache(
    cfg: K3Config, params: Any, buffers: Any, prompt: list[int], tokens: int
) -> float:
    """Tokens per second of a loop that reads the whole sequence for every token, compiled once."""
    graphdef, _, _ = abstract_model(cfg)
    size = len(prompt) + tokens

    @jax.jit
    def following(params, row, length):
        model = merge(graphdef, params, buffers)
        h, _, _ = model.hidden(row, segment_ids=(jnp.arange(size) < length)[None].astype(jnp.int32))
        last = jax.lax.dynamic_slice_in_dim(h, length - 1, 1, axis=1)
        return jnp.argmax(model.logits(last)[0, 0])

    row = np.zeros((1, size), np.int32)
    row[0, : len(prompt)] = prompt
    following(params, row, len(prompt)).block_until_ready()
    start = time.perf_counter()
    for length in range(len(prompt), size):
        row[0, length] = int(following(params, row, length))
    return tokens / (time.perf_counter() - start)


def cpu(tokens: int) -> None:
    """The engine with one slot beside `without_cache`, on nano."""
    cfg = preset("nano")().model
    params, buffers = init_params(cfg, jax.random.key(0))
    prompt = list(range(65, 81))
    found = measure(cfg, params, buffers, 1, len(prompt), tokens)
    slow = without_cache(cfg, params, buffers, prompt, tokens)
    row = {
        "model": "nano",
        "tokens": tokens,
        "engine_tokens_per_s": found["decode_tokens_per_s"],
        "no_cache_tokens_per_s": slow,
        "times": found["decode_tokens_per_s"] / slow,
    } | device()
    print(json.dumps(row), flush=True)
    names = ("tokens", "engine_tokens_per_s", "no_cache_tokens_per_s", "times")
    show(f"nano, {device()}", [row], names)


def show(title: str, rows: list[dict], names: tuple[str, ...]) -> None:
    table = Table(title=title)
    for name in names:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            *(
                f"{row[name]:,.3g}" if isinstance(row[name], float) else f"{row[name]:,}"
                for name in names
            )
        )
    Console(file=sys.stderr, width=140).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    asked = parser.parse_args()
    if asked.cpu:
        cpu(asked.tokens)
    else:
        accelerator(asked.batches, asked.context, asked.tokens, asked.model)
