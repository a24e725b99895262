"""KDA, its gates and the short convolution against the official numbers."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.kda import bounded_log_decay, kda, l2_normalize, softplus_log_decay
from k3jax.pallas_kernels.short_conv import short_conv
from tests.golden_io import cases, check, load
from tests.pallas_kernels.kda_cases import jit

pytestmark = pytest.mark.golden
FLOAT_INPUTS = ("q", "k", "v", "g_raw", "beta_logits", "A_log", "dt_bias", "initial_state")


def log_decay(g_raw, dt_bias, A_log, lower_bound):
    z = g_raw + dt_bias.reshape(g_raw.shape[-2:])
    if lower_bound is None:
        return softplus_log_decay(z, A_log)
    return bounded_log_decay(z, A_log, lower_bound)


@jit
def recurrence(args, cu_seqlens, d_o, d_state):
    """The op and its gradients. Fixtures of one shape share the program, whatever their gate."""
    out, pull = jax.vjp(lambda args: kda(**args, cu_seqlens=cu_seqlens), args)
    return out, pull((d_o, d_state))[0]


@pytest.mark.parametrize("case", cases("kda_op"))
def test_recurrence(case):
    meta, tensors = load(case)
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
    (o, state), d_args = recurrence(args, tensors.get("cu_seqlens"), *cotangents)
    got = {"o": o, "final_state": state}
    got |= {f"grad_{name}": grad for name, grad in pull(d_args)[0].items()}
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
