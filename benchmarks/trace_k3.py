"""Abstract trace of the whole training step of Kimi K3: 93 layers, 2.78 T parameters, nothing allocated.

uv run python benchmarks/trace_k3.py
"""

import json
import resource
import time

import jax
import jax.numpy as jnp

from k3jax.configs import preset
from k3jax.flops import state_tree_bytes
from k3jax.train_state import init_state
from k3jax.train_step import make_train_step

if __name__ == "__main__":
    cfg = preset("kimi_k3")()
    begin = time.perf_counter()
    state = jax.eval_shape(lambda: init_state(cfg.model, cfg.optim, jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((1, 8, cfg.seq_len), jnp.int32)
    batch = {"tokens": rows, "segment_ids": rows}
    new, metrics = jax.eval_shape(make_train_step(cfg), state, batch)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), state, new)
    print(
        json.dumps(
            {
                "seconds": round(time.perf_counter() - begin, 1),
                "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "state_bytes": state_tree_bytes(state),
                "state_keeps_its_shapes": all(jax.tree.leaves(same)),
                "metrics": sorted(metrics),
            }
        )
    )
