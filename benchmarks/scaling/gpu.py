"""`mini` on two GPUs of one host: the same result as one, and how much faster.

    python -m benchmarks.scaling.gpu --out benchmarks/scaling/gpu.jsonl

For each way to use two GPUs (fsdp, expert, context, tensor, data): a few steps on the batch of one GPU
(strong scaling; the losses must agree), and on twice that batch (weak scaling). Then one KDA layer over
a row of 131,072 tokens on one GPU, and on two by context parallelism, forward and backward. With one
GPU in the machine only the rows of one GPU are written. JSON lines; correctness first.
"""

import argparse
import itertools
import json
import statistics
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.configs.k3 import kimi_k3_model
from k3jax.configs.small import mini
from k3jax.sharding.annotate import psum, region, sum_over_replicas
from k3jax.sharding.context_parallel import gather_tokens
from k3jax.sharding.mesh import AXES, MeshConfig, batch_sharding, make_mesh
from k3jax.sharding.rules import logical_axes, state_specs
from k3jax.train_state import init_state
from k3jax.train_step import make_train_step

WAYS = ("data", "fsdp", "expert", "context", "tensor")
CHECKED, TIMED = 3, 8  # steps whose losses are compared; further ones that are timed
LONG = 131_072


def mesh_of(way: str | None, devices: int):
    sizes = dict.fromkeys(AXES, 1) | ({} if way is None else {way: devices})
    return make_mesh(MeshConfig(**sizes), jax.devices()[:devices])


def train(way: str | None, devices: int, rows: int, seq_len: int) -> dict:
    """Losses of the first steps, tokens per second, peak memory of a device."""
    cfg = replace(mini(), batch_size=rows, accumulation=1, seq_len=seq_len, steps=1000)
    mesh = mesh_of(way, devices)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, cfg.model.vocab_size, (1, rows, seq_len), np.int32)
    segment_ids = np.sort(rng.integers(1, 5, tokens.shape, np.int32), axis=-1)
    with jax.set_mesh(mesh):
        make = jax.jit(lambda key: init_state(cfg.model, cfg.optim, key, mesh))
        state = make(jax.random.key(0))
        batch = jax.device_put({"tokens": tokens, "segment_ids": segment_ids}, batch_sharding(mesh))
        begin = time.perf_counter()
        step = make_train_step(cfg, mesh=mesh).lower(state, batch).compile()
        compiled = time.perf_counter() - begin
        losses, seconds = [], []
        for _ in range(CHECKED + TIMED):
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[CHECKED:])
    return {
        "losses": losses[:CHECKED],
        "tokens_per_second": rows * seq_len / median,
        "seconds": median,
        "spread": max(seconds[CHECKED:]) - min(seconds[CHECKED:]),
        "compile_seconds": round(compiled, 1),
        "peak_gib": jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30,
    }


def kda_layer(devices: int, size: str, length: int = LONG) -> tuple[dict, dict]:
    """Figures of one KDA layer, forward and backward, and its output and gradients for comparison."""
    model = mini().model if size == "mini" else kimi_k3_model()
    width = model.width
    layer = nnx.eval_shape(
        lambda: model.kda.build(
            width, rngs=nnx.Rngs(params=0), param_dtype="bfloat16", init_std=0.02
        )
    )
    graphdef, abstract = nnx.split(layer)
    mesh = mesh_of("context", devices)
    axes = logical_axes(layer)
    shapes = nnx.to_pure_dict(abstract)
    specs = state_specs(shapes, axes, mesh.shape)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        name = str(path[-1].key)
        values = {"weight": 1.0, "A_log": 0.0, "dt_bias": -4.0}.get(name)
        if values is None:
            values = 0.02 * rng.standard_normal(leaf.shape, np.float32)
        return jnp.asarray(np.broadcast_to(values, leaf.shape), leaf.dtype)

    params = jax.device_put(
        jax.tree_util.tree_map_with_path(draw, shapes),
        jax.tree.map(partial(NamedSharding, mesh), specs),
    )
    tokens = PartitionSpec(None, "context", None)
    x = jax.device_put(
        jnp.asarray(rng.standard_normal((1, length, width), np.float32), jnp.bfloat16),
        NamedSharding(mesh, tokens),
    )

    def local(params, x):
        def loss(params, x):
            ids = gather_tokens(jnp.ones(x.shape[:2], jnp.int32))
            y, _ = nnx.merge(graphdef, params)(x, ids)
            return jnp.square(y.astype(jnp.float32)).mean()

        value, (d_params, d_x) = jax.value_and_grad(loss, argnums=(0, 1))(params, x)
        return psum(value, "context"), sum_over_replicas(d_params, specs), d_x

    with jax.set_mesh(mesh):
        run = region(
            local, mesh, in_specs=(specs, tokens), out_specs=(PartitionSpec(), specs, tokens)
        )
        run = jax.jit(run).lower(params, x).compile()
        out = jax.block_until_ready(run(params, x))
        seconds = []
        for _ in range(TIMED):
            begin = time.perf_counter()
            jax.block_until_ready(run(params, x))
            seconds.append(time.perf_counter() - begin)
    value, d_params, d_x = out
    value = float(value) / devices  # each device took the mean of its own part
    checked = {"loss": value, "q_proj": np.asarray(d_params["q_proj"]["kernel"], np.float32)}
    checked["q_proj"] /= devices
    checked["x"] = np.asarray(d_x[:, :: length // 64], np.float32) / devices
    return {"seconds": statistics.median(seconds), "tokens": length}, checked


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / np.abs(b).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", type=int, default=4, help="rows of one GPU")
    parser.add_argument("--seq-len", type=int, default=4096)
    args = parser.parse_args()
    devices = len(jax.devices())
    about = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "rows": args.rows,
        "seq_len": args.seq_len,
    }

    def write(**figures) -> None:
        line = json.dumps(about | figures)
        print(line, flush=True)
        with open(args.out, "a") as out:
            out.write(line + "\n")

    one = train(None, 1, args.rows, args.seq_len)
    write(what="mini", way="one", devices=1, **one)
    if devices > 1:
        for way, scaling in itertools.product(WAYS, ("strong", "weak")):
            rows = args.rows * (2 if scaling == "weak" else 1)
            two = train(way, 2, rows, args.seq_len)
            ratio = two["tokens_per_second"] / one["tokens_per_second"]
            off = None
            if scaling == "strong":
                off = difference(np.array(two["losses"]), np.array(one["losses"]))
                assert off < 1e-3, (way, two["losses"], one["losses"])
            write(
                what="mini", way=way, devices=2, scaling=scaling, ratio=ratio, loss_off=off, **two
            )
    for size in ("mini", "kimi_k3"):
        one_layer, wanted = kda_layer(1, size)
        write(what="kda layer", size=size, devices=1, **one_layer)
        if devices > 1:
            two_layer, found = kda_layer(2, size)
            off = {
                name: difference(np.asarray(found[name]), np.asarray(wanted[name]))
                for name in wanted
            }
            assert max(off.values()) < 0.05, off  # bfloat16
            speedup = one_layer["seconds"] / two_layer["seconds"]
            write(what="kda layer", size=size, devices=2, speedup=speedup, off=off, **two_layer)


if __name__ == "__main__":
    main()
