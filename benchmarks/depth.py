"""Trace and compile time of the gradient, 21 against 93 layers of the same widths.

    uv run python benchmarks/depth.py

One JSON line per depth: seconds to trace and lower, seconds to compile, lines of the program.
"""

import json
import time
from dataclasses import replace

import jax
import jax.numpy as jnp

from k3jax.configs import preset
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.train_state import abstract_model, merge


def measure(num_layers: int) -> dict:
    nano = preset("nano")().model
    block = AttnResConfig(kind="block", block_size=12)
    cfg = replace(nano, num_layers=num_layers, attn_res=block, remat="full")
    graphdef, params, buffers = abstract_model(cfg)
    tokens = jax.ShapeDtypeStruct((1, 64), jnp.int32)

    def loss(params, buffers, tokens):
        return merge(graphdef, params, buffers).hidden(tokens)[0].sum()

    begin = time.perf_counter()
    lowered = jax.jit(jax.grad(loss)).lower(params, buffers, tokens)
    traced = time.perf_counter()
    lowered.compile()
    done = time.perf_counter()
    return {
        "layers": num_layers,
        "trace_s": round(traced - begin, 2),
        "compile_s": round(done - traced, 2),
        "lines": len(lowered.as_text().splitlines()),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    measure(5)  # caches that the first trace fills
    for depth in (21, 93):
        print(json.dumps(measure(depth)), flush=True)
