"""The Triton kernel of `kda_step`: interpreted over memory full of NaN, or on the card."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.kda import kda_step
from k3jax.pallas_kernels.kda.gpu_decode import unsupported
from tests.pallas_kernels.kda_cases import NAMES, H, K, V, compare, jit, make_inputs, oracle
from tests.pallas_kernels.test_kda_decode import ROWS, SLOTS, at, row_of_tokens

GPU = "triton_gpu"


@functools.partial(jit, static_argnames=("erase", "backend"))
def step(token, state, slots=None, has_state=None, erase=True, backend=GPU):
    return kda_step(*token, state, slots=slots, has_state=has_state, erase=erase, backend=backend)


@pytest.mark.parametrize("erase", [True, False])
def test_steps_equal_the_recurrence(erase):
    inputs = make_inputs(5)
    want = oracle(inputs, erase=erase)
    state, outputs = inputs["state"], []
    for t in range(5):
        o, state = step([inputs[n][:, t] for n in NAMES[:5]], state, erase=erase)
        outputs.append(o)
    got = {"o": np.stack(outputs, 1), "final_state": state}
    compare(got, {name: want[name] for name in got})


def test_a_pool_with_recycled_slots_and_idle_rows():
    """NaN in a slot of a request without history and in all others; ids outside touch nothing."""
    tokens, state, _ = row_of_tokens(1)
    for idle in (SLOTS, -1, 2**31 - 1):
        slots, has_state = np.array([5, 0, idle, 2], np.int32), np.array([True, False, True, True])
        pool = np.full((SLOTS, H, K, V), np.nan, np.float32)
        pool[[5, 2]] = state[[0, 3]]
        o, new = step(at(tokens, 0), pool, slots, has_state)
        entering = np.where(np.array([1, 0, 0, 1])[:, None, None, None], state, 0)
        want, want_state = step(at(tokens, 0), entering, backend="chunked")
        compare({"o": o, "state": new[slots[[0, 1, 3]]]},
                {"o": want, "state": want_state[np.array([0, 1, 3])]})  # fmt: skip
        assert np.isnan(np.delete(new, [5, 0, 2], axis=0)).all()


def test_without_a_pool_a_request_without_history_starts_empty():
    tokens, state, _ = row_of_tokens(1)
    has_state = np.array([True, False, True, False])
    poisoned = np.where(has_state[:, None, None, None], state, np.nan)
    got = step(at(tokens, 0), poisoned, has_state=has_state)
    want = step(at(tokens, 0), poisoned, has_state=has_state, backend="chunked")
    compare(dict(zip("os", got, strict=True)), dict(zip("os", want, strict=True)))


@pytest.mark.parametrize("decay", ["head", None])
def test_relatives_and_grouped_heads(decay):
    """A decay per head or none; six heads of values on two of queries; bfloat16 inputs."""
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(3, 2, 16)) / 4 for _ in range(2))
    v = rng.normal(size=(3, 6, 40))
    g = None if decay is None else jnp.asarray(-rng.random((3, 6)), jnp.float32)
    beta, state = rng.random((3, 6)), rng.normal(size=(3, 6, 16, 40))
    token = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)] + [g, jnp.asarray(beta, "float32")]
    got, want = (step(token, jnp.asarray(state, "float32"), backend=b) for b in (GPU, "chunked"))
    assert got[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(*(x[0].astype("float32") for x in (got, want)), rtol=1e-2, atol=1e-2)


def test_gradients_are_those_of_the_plain_form():
    tokens, state, _ = row_of_tokens(1, regimes=ROWS[:2])

    def gradients(backend):
        def loss(token, state):
            return sum(jnp.sin(x).sum() for x in step(token, state, backend=backend))

        return jax.grad(loss, argnums=(0, 1))(at(tokens, 0), state)

    for a, b in zip(*(jax.tree.leaves(gradients(n)) for n in (GPU, "chunked")), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_kf_036_a_donated_pool_is_not_copied():
    tokens, _, _ = row_of_tokens(1, regimes=("mild",))
    pool = jax.ShapeDtypeStruct((64, H, K, V), jnp.float32)
    lowered = jax.jit(
        lambda token, pool, slots: kda_step(*token, pool, slots=slots, backend=GPU),
        donate_argnums=1,
    ).lower(at(tokens, 0), pool, np.array([3]))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.size * 4
    assert memory.temp_size_in_bytes < pool.size * 4 / 4


@pytest.mark.parametrize(
    "change, reason",
    [({"K": 512}, "512"), ({"B": 0}, "nothing"), ({"dtype": "float64"}, "float64")],
)
def test_what_the_kernel_declines(change, reason):
    def reasons(B=4, K=128, dtype="bfloat16"):
        q = jax.ShapeDtypeStruct((B, 96, K), np.dtype(dtype) if dtype != "bfloat16" else dtype)
        return unsupported(q, q, jax.ShapeDtypeStruct((B, 96, K, 128), "float32"))

    assert reason in reasons(**change)
    assert reasons() is None
