"""What bfloat16 costs the chunked backend of KDA over a long row, next to tokamax.

    uv run --with tokamax==0.0.17 python benchmarks/kda/errors.py [tokens]

Both get the same bfloat16 q, k, v and decay logits, not normalised, and float32 beta, A_log and
dt_bias; the truth is the recurrence in float64 on the same numbers. Per result the error is
|x - truth| / |truth| in the 2-norm. A gradient in its input's dtype carries that rounding, 1.7e-3
for bfloat16, whoever computes it; so does the output.
"""

import importlib.util
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from k3jax.pallas_kernels.kda import bounded_log_decay, kda_from_logits, l2_normalize, reference
from k3jax.pallas_kernels.kda.gates import normalize_query

B, H, K = 1, 2, 128
G_MIN = -5.0
SEGMENT = 256  # tokens whose memories the recurrence keeps at a time for its backward pass
NAMES = ("q", "k", "v", "z", "beta", "A_log", "dt_bias")
Results = tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]


def make_inputs(T: int) -> dict[str, jax.Array]:
    """Inputs and cotangents; channels from those that forget at once to those that hardly do."""
    keys = jax.random.split(jax.random.key(0), 9)
    rows = (*zip(("q", "k", "v", "z", "d_o"), keys, strict=False),)
    inputs = {n: jax.random.normal(key, (B, T, H, K)).astype(jnp.bfloat16) for n, key in rows}
    return inputs | {
        "beta": jax.nn.sigmoid(jax.random.normal(keys[5], (B, T, H))),
        "A_log": jax.random.uniform(keys[6], (H,), maxval=0.5),
        "dt_bias": jax.random.uniform(keys[7], (H, K), minval=-10.0, maxval=0.0),
        "d_state": jax.random.normal(keys[8], (B, H, K, K)),
    }


def recurrence(q, k, v, z, beta, A_log, dt_bias) -> Results:
    """Token by token, its memories computed again segment by segment."""
    g = bounded_log_decay(z + dt_bias, A_log, G_MIN)
    tokens = (normalize_query(q), l2_normalize(k), v, g, beta)
    segments = [jnp.moveaxis(x, 1, 0).reshape(-1, SEGMENT, B, *x.shape[2:]) for x in tokens]

    def step(state, token):
        q, k, v, g, beta = token
        o, state = reference.step(q, k, v, g, beta, state)
        return state, o

    segment = jax.checkpoint(lambda state, tokens: jax.lax.scan(step, state, tokens))
    state, o = jax.lax.scan(segment, jnp.zeros((B, H, K, K), v.dtype), segments)
    return jnp.moveaxis(o.reshape(-1, B, H, K), 0, 1), state


def chunked(q, k, v, z, beta, A_log, dt_bias) -> Results:
    o, state = kda_from_logits(q, k, v, z, beta, A_log, dt_bias, g_min=G_MIN, backend="chunked")
    return o, state


def tokamax(q, k, v, z, beta, A_log, dt_bias) -> Results:
    from tokamax._src.ops.kda import api

    heads_first = (jnp.moveaxis(x, 2, 0) for x in (q, k, v, z, beta))
    o, state = api.kimi_delta_attention(
        *heads_first,
        a_log=A_log,
        delta_time_bias=dt_bias.reshape(-1),
        use_qk_l2norm=True,
        use_gate_in_kernel=True,
        lower_bound=G_MIN,
        output_final_state=True,
        implementation="xla_chunked",
    )
    return jnp.moveaxis(o, 0, 2), state[:, 0]


def results(call: Callable[..., Results], inputs: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """Outputs, final memory and all gradients, as float64."""

    @jax.jit
    def run(inputs):
        (o, state), pull = jax.vjp(call, *(inputs[name] for name in NAMES))
        d = inputs["d_o"].astype(o.dtype), inputs["d_state"].astype(state.dtype)
        return o, state, *pull(d)

    names = ("o", "state", *(f"d{name}" for name in NAMES))
    return {n: np.asarray(x, np.float64) for n, x in zip(names, run(inputs), strict=True)}


def main(T: int) -> None:
    inputs = make_inputs(T)
    with jax.enable_x64(True):
        truth = results(recurrence, {n: x.astype(jnp.float64) for n, x in inputs.items()})
    calls: dict[str, Callable[..., Results]] = {"chunked": chunked}
    if importlib.util.find_spec("tokamax"):
        calls["tokamax xla_chunked"] = tokamax
    found = {name: results(call, inputs) for name, call in calls.items()}
    print(" | ".join(["", "result", *calls, ""]).strip())
    print("|" + " --- |" * (1 + len(calls)))
    for n, want in truth.items():
        errors = [np.linalg.norm(x[n] - want) / np.linalg.norm(want) for x in found.values()]
        print(" | ".join(["", n, *(f"{error:.2e}" for error in errors), ""]).strip())


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 65536)
