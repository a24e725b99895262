"""The TPU kernels, interpreted over memory filled with NaN, against the recurrence in float64.

Interpreting compiles slowly, so the tests share few programs; `tests/aot` compiles the kernels for
real chips.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.kda import kda_from_logits
from k3jax.pallas_kernels.kda.config import Config
from k3jax.pallas_kernels.kda.pallas_tpu import unsupported
from tests.pallas_kernels.kda_cases import compare, jit, make_inputs, program

T = 200  # three chunks and a bit: the pipelined order of a step, and padding
BLOCKS = 600  # two blocks of five chunks: a step finishes work on the block before
LOGITS = ("q", "k", "v", "z", "beta", "A_log", "dt_bias", "state")
# Gates of at least -5, which the kernels promise to take, and the keys that test the inverse most.
REGIMES = ("open_identical_keys", "slow_correlated_keys", "mild_negative_eigenvalues", "floor")


def interpreted():
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan"))


def run(inputs, segment_ids=None, cu_seqlens=None, **settings):
    settings = tuple(sorted(({"backend": "pallas_tpu", "g_min": -5.0} | settings).items()))
    with interpreted():
        return program(inputs, segment_ids, cu_seqlens, settings)


def oracle(inputs, segment_ids=None, cu_seqlens=None, **settings):
    settings = tuple(sorted(({"backend": "reference"} | settings).items()))
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in inputs.items()}
        return jax.device_get(program(wide, segment_ids, cu_seqlens, settings))


def logits(tokens: int, heads: int, seed: int, dtype="float32") -> dict:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    shape = (1, tokens, heads, 128)
    k = normal(*shape)
    inputs = {
        "q": normal(*shape),
        "k": k + 2 * k[:, :1],
        "v": normal(*shape),
        "z": 3 * normal(*shape) - 2,
        "beta": 1 / (1 + np.exp(-1 - normal(1, tokens, heads))),
        "A_log": 0.3 * normal(heads),
        "dt_bias": 0.3 * normal(heads, 128),
        "state": normal(1, heads, 128, 128),
        "d_o": normal(*shape),
        "d_state": normal(1, heads, 128, 128),
    }
    low = ("q", "k", "v", "z", "d_o")
    return {name: jnp.asarray(x, dtype if name in low else None) for name, x in inputs.items()}


@functools.partial(jit, static_argnames="backend")
def from_logits(inputs, backend):
    """Outputs, final memory and all gradients of `kda_from_logits`."""

    def f(args):
        return kda_from_logits(**args, g_min=-5.0, backend=backend)

    (o, state), pull = jax.vjp(f, {name: inputs[name] for name in LOGITS})
    cotangents = (inputs["d_o"].astype(o.dtype), inputs["d_state"].astype(state.dtype))
    grads = pull(cotangents)[0]
    return {"o": o, "final_state": state} | {f"grad_{name}": x for name, x in grads.items()}


def from_logits_both(inputs):
    with interpreted():
        got = jax.device_get(from_logits(inputs, "pallas_tpu"))
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in inputs.items()}
        return got, jax.device_get(from_logits(wide, "reference"))


@pytest.mark.parametrize("seed", [0, 1])
def test_logits_match_the_recurrence(seed):
    """L2 norm, gate, operator and all their gradients in float32."""
    inputs = logits(T, 1, seed)
    if seed:  # KF-010: the gate at its bound, wide open, and alternating between the two
        z = np.full(inputs["z"].shape, 20.0, np.float32)
        z[:, 70:140] = -20
        z[:, 140::2] = -20
        inputs["z"] = jnp.asarray(z)
    got, want = from_logits_both(inputs)
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, want)


def test_a_step_of_four_heads_and_several_blocks():
    """Timetables of four heads: nothing is read before it is written or after it is written anew."""
    inputs = logits(BLOCKS, 4, 3)
    got, want = from_logits_both(inputs)
    for results in (got, want):  # one number per head: relative to the largest of them
        results["grad_A_log"] = results["grad_A_log"][None]
    compare(got, want)


def test_logits_in_bfloat16():
    """Errors in norm at the level of bfloat16's rounding, for the gate's gradients too."""
    got, want = from_logits_both(logits(T, 1, 2, "bfloat16"))
    for name, x in want.items():
        error = np.linalg.norm(np.asarray(got[name], np.float64) - x) / np.linalg.norm(x)
        assert error <= 1e-2, (name, error)


def test_every_gate_and_key():
    """KF-002, KF-027, KF-028, KF-029: decays from none to the bound, keys from random to one alone."""
    inputs = make_inputs(T, REGIMES, heads=1)
    got = run(inputs)
    assert all(np.isfinite(x).all() for x in got.values())
    compare(got, oracle(inputs))


def test_causal_to_the_bit_and_repeatable():
    """Changing token t changes nothing before t; the same inputs give the same bits."""
    inputs = make_inputs(T, REGIMES, seed=1, heads=1)
    before, again = run(inputs), run(inputs)
    for name, x in before.items():
        np.testing.assert_array_equal(x, again[name], err_msg=name)
    for t in (17, 130):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name in ("q", "k", "v", "g", "beta"):
            changed[name][:, t:] = changed[name][:, t:] * 0.5 if name == "g" else 0.3
        after = run(changed)
        np.testing.assert_array_equal(before["o"][:, :t], after["o"][:, :t])
        assert (np.asarray(before["o"])[:, t] != np.asarray(after["o"])[:, t]).any()


def test_documents_and_padding_of_nan():
    """KF-011, KF-048: packed rows equal the recurrence, whatever lies at padding."""
    ids = [(1, 30), (2, 20), (0, 14), (3, 1), (4, 80), (5, 40), (0, 15)]
    ids += [(6, 130), (0, 7), (7, 200), (8, 63)]
    ids = np.concatenate([np.full(n, i, np.int32) for i, n in ids])[None]
    inputs = make_inputs(BLOCKS, ("mild",), seed=2, heads=3, K=64, V=40)
    poisoned = dict(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        real = ids.reshape(*ids.shape, *[1] * (inputs[name].ndim - 2)) > 0
        poisoned[name] = np.where(real, inputs[name], np.nan)
    compare(run(poisoned, ids), oracle(inputs, ids))


def test_documents_with_memories_of_their_own():
    """KF-009: offsets with an empty document, each with its own memory in and out."""
    offsets = np.array([0, 30, 30, 130, 200], np.int32)
    inputs = make_inputs(T, ("mild",), seed=3, heads=1)
    rng = np.random.default_rng(0)
    for name in ("state", "d_state"):
        inputs[name] = rng.normal(size=(4, *inputs[name].shape[1:])).astype(np.float32)
    compare(run(inputs, None, offsets), oracle(inputs, None, offsets))


def test_without_erasing_and_with_snapshots():
    inputs = make_inputs(T, ("mild", "one"), seed=4, heads=1)
    settings = {"erase": False, "snapshot_every": 64}
    compare(run(inputs, **settings), oracle(inputs, **settings))


def test_a_memory_kept_for_every_second_chunk_and_snapshots():
    inputs = make_inputs(T, ("mild", "slow_correlated_keys"), seed=5, heads=1)
    settings = {"checkpoint_every": 2, "snapshot_every": 64}
    compare(run(inputs, **settings), oracle(inputs, snapshot_every=64))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"g_min": None}, "g_min = None"),
        ({"g_min": -5.1}, "g_min = -5.1"),
        ({"chunk_size": 32}, "chunk_size = 32"),
        ({"plain_autodiff": True}, "plain_autodiff"),
        ({"K": 257}, "K = 257"),
        ({"V": 300}, "V = 300"),
        ({"dtype": "float16"}, "float16"),
        ({"checkpoint_every": 3}, "checkpoint_every = 3 with cu_seqlens"),
        ({"checkpoint_every": 2, "snapshot_every": 192}, "snapshot_every = 192"),
    ],
)
def test_kf_024_what_the_kernels_decline(change, reason):
    """A call that they cannot run is declined with the reason, never run wrongly."""
    shape = {"K": 128, "V": 128, "dtype": "float32"} | change
    settings = {
        name: x for name, x in ({"g_min": -5.0} | change).items() if name not in ("K", "V", "dtype")
    }
    q = jax.ShapeDtypeStruct((1, 64, 1, shape["K"]), shape["dtype"])
    v = jax.ShapeDtypeStruct((1, 64, 1, shape["V"]), shape["dtype"])
    offsets = jax.ShapeDtypeStruct((3,), "int32") if change.get("checkpoint_every") == 3 else None
    assert reason in unsupported(q, q, v, offsets, Config(**settings))
    fine = jax.ShapeDtypeStruct((1, 64, 1, 128), "float32")
    assert unsupported(fine, fine, fine, None, Config(g_min=-5.0)) is None
