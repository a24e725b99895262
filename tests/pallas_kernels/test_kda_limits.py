"""Odd widths, foreign layouts, chunk sizes, long rows, many documents, the precision of products."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.kda import bounded_log_decay, kda
from tests.pallas_kernels.kda_cases import (
    NAMES,
    K,
    compare,
    fast_backend,
    inputs_for,
    interpreted,
    jit,
    make_inputs,
    options,
    oracle,
    run,
)

# For the large ones: here running takes longer than compiling.
optimized = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 2})


@fast_backend
@pytest.mark.parametrize("width", [60, 96, 100])
def test_kf_001_widths_that_are_no_power_of_two(backend, width):
    """K = V, the arrays cut out of larger ones full of NaN."""
    inputs = inputs_for(backend, 17, ("mild", "mixed"), K=width, V=width)

    def surrounded(x):
        frame = np.full([n + 6 for n in x.shape], np.nan, np.float32)
        inside = tuple(slice(3, 3 + n) for n in x.shape)
        frame[inside] = x
        return jnp.asarray(frame)[inside]

    got = run({name: surrounded(x) for name, x in inputs.items()}, backend=backend)
    compare(got, oracle(inputs))


@fast_backend
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (256, 256), (128, 16), (16, 256)])
def test_kf_024_widths_other_than_the_usual_one(backend, K, V):
    inputs = inputs_for(backend, 20, ("mild",), heads=1, K=K, V=V)
    args = [inputs[n] for n in NAMES]
    f = jit(functools.partial(kda, **options(backend)))
    if backend == "triton_gpu" and max(K, V) > 128:
        with pytest.raises(ValueError, match="at most 128 fit"):
            f(*args[:5], state=args[5])
        return
    with interpreted(backend):
        o, state = f(*args[:5], state=args[5])
    want = oracle(inputs)
    compare({"o": o, "final_state": state}, {n: want[n] for n in ("o", "final_state")})


@fast_backend
def test_kf_006_slices_and_transposes_are_read_as_what_they_are(backend):
    """q, k, v out of one fused projection, beta out of a wider row, a transposed cotangent: the same
    bits as with copies."""
    inputs = inputs_for(backend, 33, ("mild", "mixed"), K=20, V=20)
    B, T, H, D = inputs["q"].shape
    rng = np.random.default_rng(0)
    fused = np.concatenate([inputs[n].reshape(B, T, H * D) for n in "qkv"], axis=-1)
    wide_beta = rng.normal(size=(B, T, 40)).astype(np.float32)
    wide_beta[..., 7 : 7 + H] = inputs["beta"]
    d_o = np.ascontiguousarray(inputs["d_o"].transpose(3, 2, 0, 1))

    def pull(args, d_o, d_state):
        f = functools.partial(kda, **options(backend))
        out, vjp = jax.vjp(lambda a: f(*a[:5], state=a[5]), args)
        return out, vjp((d_o, d_state))

    @jit
    def sliced(fused, g, wide_beta, state, d_o, d_state):
        q, k, v = (x.reshape(B, T, H, D) for x in jnp.split(fused, 3, axis=-1))
        beta = wide_beta[..., 7 : 7 + H]
        return pull([q, k, v, g, beta, state], jnp.einsum("vhbt->bthv", d_o), d_state)

    with interpreted(backend):
        got = sliced(fused, inputs["g"], wide_beta, inputs["state"], d_o, inputs["d_state"])
        want = jit(pull)([inputs[n] for n in NAMES], inputs["d_o"], inputs["d_state"])
        views = jit(pull)(
            [*(fused[..., n * H * D : (n + 1) * H * D].reshape(B, T, H, D) for n in range(3)),
             inputs["g"], wide_beta[..., 7 : 7 + H], inputs["state"]],
            d_o.transpose(2, 3, 1, 0), inputs["d_state"],
        )  # fmt: skip
    for case in (got, views):
        for a, b in zip(jax.tree.leaves(case), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


def equations(jaxpr):
    """All equations of a program, those of its scans and calls included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(getattr(value, "jaxpr", value))


def traced(T, H, D, cu_seqlens=None, dtype=jnp.float32):
    """The program of outputs and gradients at any size, without an array of it."""
    shape = {"q": (1, T, H, D), "k": (1, T, H, D), "v": (1, T, H, D), "g": (1, T, H, D)}
    shape |= {"beta": (1, T, H), "state": ((cu_seqlens or 2) - 1, H, D, D)}
    args = {n: jax.ShapeDtypeStruct(s, dtype if n in "qkv" else jnp.float32)
            for n, s in shape.items()}  # fmt: skip

    def f(args, cu_seqlens):
        out, pull = jax.vjp(lambda a: kda(**a, cu_seqlens=cu_seqlens), args)
        return out, pull(out)

    offsets = cu_seqlens and jax.ShapeDtypeStruct((cu_seqlens,), jnp.int32)
    return jax.make_jaxpr(f)(args, offsets)


@pytest.mark.parametrize(
    ("T", "H", "D", "cu_seqlens"),
    [
        (174_763, 96, 128, None),  # 2^31 elements a tensor, and 2,731 chunk states of 96 heads
        (174_763, 96, 128, 6),
        (524_288, 56, 128, None),  # 524,288 x 7,168
        (1_048_576, 96, 128, None),
    ],
)
def test_kf_007_no_index_counts_elements(T, H, D, cu_seqlens):
    """Integers of the program address tokens, chunks and documents: none reaches 2^31, and none is
    narrower than 32 bits. A flattened index would pass it at the first of these sizes."""
    assert T * H * D >= 2**31
    program = traced(T, H, D, cu_seqlens)
    indexed = 0
    for eqn in equations(program.jaxpr):
        for x in (*eqn.invars, *eqn.outvars):
            if jnp.issubdtype(x.aval.dtype, jnp.integer):
                assert x.aval.dtype.itemsize >= 4, eqn
                assert math.prod(x.aval.shape) < 2**27, eqn  # a few per token, not one per element
        if eqn.primitive.name in ("gather", "scatter", "scatter-add", "dynamic_slice"):
            indexed += 1
            operand = eqn.invars[0].aval.shape
            if eqn.primitive.name == "gather":
                dimensions = eqn.params["dimension_numbers"].start_index_map
            elif eqn.primitive.name == "dynamic_slice":
                dimensions = range(len(operand))
            else:
                dimensions = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
            assert all(operand[d] < 2**31 for d in dimensions), eqn
    assert indexed or cu_seqlens is None


def test_kf_007_positions_beyond_16_bits_equal_two_halves():
    """65,600 tokens, more than 1,024 chunks; documents begin at tokens 32,768 and 65,536."""
    T, half = 65_600, 32_768
    inputs = make_inputs(T, ("mild",), heads=1, K=16, V=16)
    args = [inputs[n] for n in NAMES[:5]]
    offsets = np.array([0, half, 65_536, T])
    ids = np.repeat(np.array([[1, 2, 3]], np.int32), np.diff(offsets), axis=1)
    f = jit(kda)
    o, state = f(*args, segment_ids=ids)
    head, _ = f(*(x[:, :half] for x in args))
    tail, last = f(*(x[:, half:] for x in args), segment_ids=ids[:, half:])
    want = {"o": np.concatenate([head, tail], 1), "state": last}
    compare({"o": o, "state": state}, want)
    packed, states = f(*args, cu_seqlens=offsets.astype(np.int32))
    compare({"o": packed, "state": states[2:]}, want)

    one = np.ones_like(ids)  # a single document, its halves joined by the state
    o, state = f(*args, segment_ids=one)
    first, middle = f(*(x[:, :half] for x in args))
    second, last = f(*(x[:, half:] for x in args), state=middle, segment_ids=one[:, half:])
    compare({"o": o, "state": state}, {"o": np.concatenate([first, second], 1), "state": last})


@pytest.mark.parametrize(("heads", "documents"), [(96, 683), (32, 2048)])
def test_kf_008_many_short_documents(heads, documents):
    """65,568 and 65,536 (document, head) pairs in a row, documents of 1 to 3 tokens: outputs and
    states of rows of their own."""
    lengths = 1 + np.arange(documents) % 3
    T, rows = int(lengths.sum()), 16
    inputs = make_inputs(rows * 3, ("mild",), heads=heads, K=16, V=16)
    rng = np.random.default_rng(0)
    pick = rng.integers(0, rows * 3, size=T)  # tokens drawn from a small stock
    args = [inputs[n][:, pick] for n in NAMES[:5]]
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    f = optimized(functools.partial(kda, chunk_size=16))
    o, states = f(*args, cu_seqlens=offsets)

    at = np.minimum(offsets[:-1, None] + np.arange(3), T - 1)  # each document as a row of 3 tokens
    real = (np.arange(3) < lengths[:, None]).astype(np.int32)
    alone = optimized(functools.partial(kda, backend="reference"))
    want, want_states = alone(*(x[0][at] for x in args), segment_ids=real)
    want = np.asarray(want)[real > 0][None]
    compare({"o": o, "states": states}, {"o": want, "states": want_states})
    if heads == 96:
        ids = np.repeat(np.arange(1, documents + 1, dtype=np.int32), lengths)[None]
        o, state = f(*args, segment_ids=ids)
        compare({"o": o, "state": state}, {"o": want, "state": want_states[-1:]})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kf_026_every_float32_product_is_computed_at_full_precision(dtype):
    """Whatever the session's default precision: products of float32 operands, forward and backward,
    name the highest; those of bfloat16 operands accumulate in float32."""
    with jax.default_matmul_precision("bfloat16"):
        program = traced(70, 2, 20, dtype=dtype)
    highest = (jax.lax.Precision.HIGHEST,) * 2
    kinds = set()
    for eqn in equations(program.jaxpr):
        if eqn.primitive.name == "dot_general":
            left, right = (x.aval.dtype for x in eqn.invars)
            kinds.add(left)
            assert eqn.outvars[0].aval.dtype == jnp.float32
            if left == jnp.float32 or right == jnp.float32:
                assert eqn.params["precision"] == highest, eqn
    assert jnp.dtype(jnp.float32) in kinds  # the solve, whatever the operands are


@pytest.mark.parametrize("chunk_size", [16, 32, 128, 256])
def test_kf_005_chunk_size_changes_no_value(chunk_size):
    """64 is the default of all other tests."""
    inputs = make_inputs(130, ("mild", "one_steep_channel", "mixed"))
    compare(run(inputs, chunk_size=chunk_size), oracle(inputs))


def test_kf_010_gradients_through_the_gate_over_a_long_row():
    """Logits +20, -20 and alternating over 4096 tokens; the last 128 against the oracle."""
    T, crop = 4096, 128
    inputs = make_inputs(T, ("floor",) * 3, heads=1)
    z = np.full((3, T, 1, K), 20.0, np.float32)
    z[1], z[2, ::2] = -20.0, -20.0
    inputs = {name: jnp.asarray(x) for name, x in inputs.items()}

    def loss(args, A_log, dt_bias):
        g = bounded_log_decay(z + dt_bias, A_log, -5.0)
        o, state = kda(args["q"], args["k"], args["v"], g, args["beta"], state=args["state"])
        return (o * inputs["d_o"])[:, -crop:].sum() + (state * inputs["d_state"]).sum()

    args = {name: inputs[name] for name in ("q", "k", "v", "beta", "state")}
    grads, *gates = jit(jax.grad(loss, argnums=(0, 1, 2)))(args, jnp.zeros(1), jnp.zeros((1, K)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((grads, gates)))

    inputs["g"] = bounded_log_decay(z, jnp.zeros(1), -5.0)
    start = {n: inputs[n][:, :-crop] for n in NAMES[:5]} | {"state": inputs["state"]}
    _, state = jit(lambda x: kda(**{n: x[n] for n in NAMES[:5]}, state=x["state"]))(start)
    tail = {n: x if "state" in n else x[:, -crop:] for n, x in inputs.items()} | {"state": state}
    want = oracle(tail)
    for name in ("q", "k", "v", "beta"):
        compare({name: grads[name][:, -crop:]}, {name: want[f"grad_{name}"]})
