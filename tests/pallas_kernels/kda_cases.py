"""Inputs in the regimes that break KDA kernels, the float64 oracle, and the comparison."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels import triton_call
from k3jax.pallas_kernels.kda import kda

# Every backend passes the contract: name -> the promised g_min, None for any decay. A name with a
# second word is the same backend under a promise that it makes use of.
BACKENDS: dict[str, float | None] = {"chunked": None, "chunked bounded": -5.0, "reference": None}
if triton_call.unavailable() is None:
    BACKENDS["triton_gpu"] = -5.0
# Kernels that are interpreted here, which takes a good part of a second per chunk and head.
INTERPRETED = {"pallas_tpu"} | ({"triton_gpu"} if jax.default_backend() != "gpu" else set())
every_backend = pytest.mark.parametrize("backend", BACKENDS)
# For tests that compile programs of their own, which is nearly all of their cost.
_plain = [name for name in BACKENDS if " " not in name]
each_backend = pytest.mark.parametrize("backend", _plain)
fast_backend = pytest.mark.parametrize("backend", [n for n in _plain if n != "reference"])

H, K, V = 2, 20, 28  # neither powers of two nor equal
NAMES = ("q", "k", "v", "g", "beta", "state")

# One row of the batch per regime: decay, keys, largest write strength.
REGIMES = {
    "open": (0.0, "random", 1.0),
    "open_identical_keys": (0.0, "identical", 1.0),
    "slow_correlated_keys": (-1e-4, "correlated", 1.0),
    "mild": (-0.05, "random", 1.0),
    "mild_negative_eigenvalues": (-0.05, "correlated", 2.0),
    "one": (-1.0, "correlated", 1.0),
    "floor": (-5.0, "random", 1.0),
    "steep": (-20.0, "correlated", 1.0),
    "steepest": (-80.0, "random", 1.0),
    "one_steep_channel": ((-80.0, -0.01), "correlated", 1.0),
    "mixed": (None, "correlated", 1.0),
}
# Tests are about values, not speed: without optimisation these programs compile 3 times faster.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def make_inputs(
    T: int, regimes=tuple(REGIMES), seed: int = 0, heads: int = H, K: int = K, V: int = V
) -> dict:
    """Arguments of `kda` plus cotangents d_o and d_state, one row per regime."""
    rng = np.random.default_rng([seed, T])
    rows = []
    for name in regimes:
        decay, keys, beta_max = REGIMES[name]
        common = unit(rng.normal(size=(1, heads, K)))
        k = unit(rng.normal(size=(T, heads, K)))
        if keys == "identical":
            k = np.broadcast_to(common, k.shape)
        elif keys == "correlated":  # pairwise cosine about 0.9
            k = unit(np.sqrt(0.1) * k + np.sqrt(0.9) * common)
        if decay is None:  # per token and channel: never, slow, at the floor, beyond it
            g = rng.choice([0.0, -1e-4, -0.05, -1.0, -5.0, -80.0], size=(T, heads, K))
        elif isinstance(decay, tuple):
            g = np.full((T, heads, K), decay[1])
            g[..., 3] = decay[0]
        else:
            g = np.full((T, heads, K), decay)
        beta = rng.uniform(0.0, beta_max, size=(T, heads))
        beta[::3] = beta_max
        rows.append(
            {
                "q": unit(rng.normal(size=(T, heads, K))) * K**-0.5,
                "k": k,
                "v": rng.normal(size=(T, heads, V)),
                "g": g,
                "beta": beta,
                "state": rng.normal(size=(heads, K, V)),
                "d_o": rng.normal(size=(T, heads, V)),
                "d_state": rng.normal(size=(heads, K, V)),
            }
        )
    return {
        name: np.stack([row[name] for row in rows]).astype(np.float32) if rows else None
        for name in rows[0]
    }


def options(backend: str) -> dict:
    """The arguments of `kda` that select a row of BACKENDS."""
    return {"backend": backend.split()[0], "g_min": BACKENDS[backend]}


def rows(backend: str) -> slice | list[int]:
    """Which of the rows of the regimes a backend gets: two if it is interpreted."""
    names = list(REGIMES)
    few = [names.index("open_identical_keys"), names.index("mixed")]
    return few if backend in INTERPRETED else slice(None)


def inputs_for(backend: str, *args, **kwargs) -> dict:
    """`make_inputs` with the decays that the backend takes, and as many rows and heads as it can."""
    inputs, g_min = make_inputs(*args, **kwargs), BACKENDS[backend]
    if g_min is not None:
        inputs["g"] = np.maximum(inputs["g"], np.float32(g_min))
    if backend in INTERPRETED and len(inputs["q"]) == len(REGIMES):
        inputs = {n: x[rows(backend)] for n, x in inputs.items()}
    if backend in INTERPRETED and "heads" not in kwargs:
        inputs = {n: x[:, :1] if "state" in n else x[:, :, :1] for n, x in inputs.items()}
    return inputs


def interpreted(backend: str):
    """The context in which this backend runs here: TPU kernels interpreted, over memory of NaN."""
    if backend == "pallas_tpu":
        return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))
    return contextlib.nullcontext()


@functools.partial(jit, static_argnames="settings")
def program(inputs, segment_ids, cu_seqlens, settings):
    args = {name: inputs[name] for name in NAMES if name in inputs}

    def f(args):
        return kda(
            **{name: args.get(name) for name in NAMES},
            segment_ids=segment_ids,
            cu_seqlens=cu_seqlens,
            **dict(settings),
        )

    (o, state, *snapshots), pull = jax.vjp(f, args)
    cotangents = (inputs["d_o"].astype(o.dtype), inputs["d_state"].astype(state.dtype))
    d_snapshots = [jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) % 7 - 3 for x in snapshots]
    (grads,) = pull((*cotangents, *d_snapshots))
    out = {"o": o, "final_state": state} | {f"grad_{name}": x for name, x in grads.items()}
    return out | ({"snapshots": snapshots[0]} if snapshots else {})


def run(inputs, segment_ids=None, cu_seqlens=None, *, backend="chunked", **settings):
    """Outputs, final states and the gradients of sum(o d_o) + sum(state d_state), by name.

    Inputs without a `g` mean no decay. Settings are those of `kda`.
    """
    settings = tuple(sorted((options(backend) | settings).items()))
    with interpreted(backend):
        return program(inputs, segment_ids, cu_seqlens, settings)


def oracle(inputs, segment_ids=None, cu_seqlens=None, **settings) -> dict:
    """`run` of the token-by-token form in float64."""
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in inputs.items()}
        return jax.device_get(run(wide, segment_ids, cu_seqlens, backend="reference", **settings))


def compare(got: dict, want: dict, rtol: float = 1e-5, floor: float = 1e-3) -> None:
    """Every row of every result within rtol of the row's largest value (at least `floor`)."""
    assert got.keys() == want.keys()
    for name in want:
        a, b = np.asarray(got[name], np.float64), np.asarray(want[name], np.float64)
        assert a.shape == b.shape, (name, a.shape, b.shape)
        if a.size == 0:
            continue
        rest = tuple(range(1, a.ndim))
        error, scale = np.abs(a - b).max(rest), np.maximum(np.abs(b).max(rest), floor)
        assert (error <= rtol * scale).all(), f"{name}: per row {error / scale}"
