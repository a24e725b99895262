"""KDA, its gates and the short convolution against the official numbers."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.kda import (
    bounded_log_decay,
    kda,
    kda_from_logits,
    l2_normalize,
    softplus_log_decay,
)
from k3jax.pallas_kernels.short_conv import short_conv
from tests.golden_io import cases, check, load
from tests.pallas_kernels.kda_cases import BACKENDS, each_backend, interpreted, jit, options

pytestmark = pytest.mark.golden
FLOAT_INPUTS = ("q", "k", "v", "g_raw", "beta_logits", "A_log", "dt_bias", "initial_state")


def log_decay(g_raw, dt_bias, A_log, lower_bound):
    z = g_raw + dt_bias.reshape(g_raw.shape[-2:])
    if lower_bound is None:
        return softplus_log_decay(z, A_log)
    return bounded_log_decay(z, A_log, lower_bound)


@functools.partial(jit, static_argnames="backend")
def recurrence(args, cu_seqlens, d_o, d_state, backend):
    """The op and its gradients. Fixtures of one shape share the program, whatever their gate."""
    f = functools.partial(kda, cu_seqlens=cu_seqlens, **options(backend))
    out, pull = jax.vjp(lambda args: f(**args), args)
    return out, pull((d_o, d_state))[0]


@each_backend
@pytest.mark.parametrize("case", cases("kda_op"))
def test_recurrence(case, backend):
    meta, tensors = load(case)
    if BACKENDS[backend] is not None and meta["config"]["lower_bound"] != BACKENDS[backend]:
        pytest.skip(f"{backend} takes bounded gates")
    config = meta["config"]
    x = {name: jnp.asarray(tensors[name]) for name in tensors if name in FLOAT_INPUTS}

    def prepare(x):
        eps, A_log = config["l2norm_eps"], x["A_log"]
        return {
            "q": l2_normalize(x["q"], eps) * config["scale"],
            "k": l2_normalize(x["k"], eps),
            "v": x["v"],
            "g": log_decay(x["g_raw"], x["dt_bias"], A_log, config["lower_bound"]),
            "beta": jax.nn.sigmoid(x["beta_logits"]),
            "state": x.get("initial_state", jnp.zeros_like(tensors["final_state"])),
        }

    args, pull = jax.vjp(prepare, x)
    cotangents = tensors["d_o"], tensors["d_final_state"]
    with interpreted(backend):
        (o, state), d_args = recurrence(args, tensors.get("cu_seqlens"), *cotangents, backend)
    got = {"o": o, "final_state": state}
    got |= {f"grad_{name}": grad for name, grad in pull(d_args)[0].items()}
    assert got.keys() == meta["tolerance"].keys()
    for name in got:
        check(name, got[name], meta)


RAW = {"q": "q", "k": "k", "v": "v", "g_raw": "z", "A_log": "A_log", "initial_state": "state"}


@functools.partial(jit, static_argnames=("g_min", "backend"))
def from_logits(x, cu_seqlens, d_o, d_state, g_min, backend):
    def f(x):
        args = {ours: x[name] for name, ours in RAW.items() if name in x}
        args["beta"] = jax.nn.sigmoid(x["beta_logits"])
        args["dt_bias"] = x["dt_bias"].reshape(x["g_raw"].shape[2:])
        return kda_from_logits(**args, g_min=g_min, cu_seqlens=cu_seqlens, backend=backend)

    out, pull = jax.vjp(f, x)
    return out, pull((d_o, d_state))[0]


@each_backend
@pytest.mark.parametrize(
    "case", [c for c in cases("kda_op") if re.search("_T33_h0|lb_packed_h0|_gate_wide", c)]
)
def test_raw_projections(case, backend):
    """Norm and gate inside the op; the fixtures hold what they get."""
    meta, tensors = load(case)
    g_min = meta["config"]["lower_bound"]
    if BACKENDS[backend] is not None and g_min != BACKENDS[backend]:
        pytest.skip(f"{backend} takes bounded gates")
    x = {name: jnp.asarray(tensors[name]) for name in tensors if name in FLOAT_INPUTS}
    cotangents = tensors["d_o"], tensors["d_final_state"]
    with interpreted(backend):
        (o, state), grads = from_logits(x, tensors.get("cu_seqlens"), *cotangents, g_min, backend)
    got = {"o": o, "final_state": state} | {f"grad_{name}": grad for name, grad in grads.items()}
    assert got.keys() == meta["tolerance"].keys()
    for name in got:
        check(name, got[name], meta)


@pytest.mark.parametrize("case", cases("kda_gate"))
def test_gates(case):
    meta, x = load(case)
    bound = meta["config"]["lower_bound"]
    for name, lower_bound in {"log_decay_lower_bound": bound, "log_decay_softplus": None}.items():
        check(name, log_decay(jnp.asarray(x["g_raw"]), x["dt_bias"], x["A_log"], lower_bound), meta)


@pytest.mark.parametrize("case", cases("norms"))
def test_l2_norm(case):
    meta, x = load(case)
    y, pull = jax.vjp(lambda x: l2_normalize(x, meta["l2norm_eps"]), jnp.asarray(x["x"]))
    check("l2", y, meta)
    check("l2_grad_x", pull(jnp.asarray(x["d_y"]))[0], meta)


@functools.partial(jit, static_argnames="offsets")
def convolution(x, kernel, cache, d_y, offsets):
    """(y, new cache), gradients; with offsets one call per document, as packing must equal."""

    def forward(x, kernel):
        if offsets is None:
            return short_conv(x, kernel, cache=cache)
        pieces = [
            short_conv(x[:, a:b], kernel, cache=None if cache is None else cache[n : n + 1])
            for n, (a, b) in enumerate(itertools.pairwise(offsets))
        ]
        y, caches = zip(*pieces, strict=True)
        return jnp.concatenate(y, axis=1), jnp.concatenate(caches)

    out, pull = jax.vjp(forward, x, kernel)
    return out, pull((d_y, jnp.zeros_like(out[1])))


@pytest.mark.parametrize("case", cases("short_conv"))
def test_short_conv(case):
    """Channels as one head; the stored cache has a fourth, never used, oldest column."""
    meta, x = load(case)
    kernel = x["weights.weight"][:, 0].T[:, None]  # W 1 channels
    tags = [name.removesuffix(".x") for name in x if name.endswith(".x")]
    assert tags
    for tag in tags:
        past, offsets = x.get(f"{tag}.cache_in"), x.get(f"{tag}.cu_seqlens")
        cache = None if past is None else past.transpose(0, 2, 1)[:, 1:, None]
        inputs, d_y = x[f"{tag}.x"][:, :, None], x[f"{tag}.d_y"][:, :, None]
        documents = None if offsets is None else tuple(offsets.tolist())
        (y, new_cache), (dx, dw) = convolution(inputs, kernel, cache, d_y, documents)
        check(f"{tag}.y", np.asarray(y)[:, :, 0], meta)
        check(f"{tag}.grad_x", np.asarray(dx)[:, :, 0], meta)
        check(f"{tag}.grad_weight", np.asarray(dw)[:, 0].T[:, None], meta)
        want = x[f"{tag}.cache_out"].transpose(0, 2, 1)[:, 1:]
        np.testing.assert_array_equal(np.asarray(new_cache)[:, :, 0], want)
        if cache is None and offsets is not None:
            ids = np.repeat(np.arange(1, len(offsets)), np.diff(offsets))[None]
            y, last = jit(short_conv)(inputs, kernel, segment_ids=ids)
            check(f"{tag}.y", np.asarray(y)[:, :, 0], meta)
            np.testing.assert_array_equal(np.asarray(last)[:, :, 0], want[-1:])
