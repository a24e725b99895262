"""Gated MLA with tokens split over devices, its pairs of chunks by the TPU kernels, interpreted."""

import functools
from dataclasses import replace
from unittest import mock

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.layers import mla
from k3jax.pallas_kernels import dispatch
from k3jax.testing import assert_close, random_layer
from tests.layers.helpers import TINY_MLA, normal, segments
from tests.layers.test_mla_context import WIDTH, split, unsharded

pytestmark = pytest.mark.devices
WIDE = replace(TINY_MLA, q_rank=7, kv_rank=7, qk_nope_dim=128, qk_shared_dim=16, v_dim=128)


def test_equals_the_unsharded_layer():
    """Chunks that no block of the kernels divides, documents across ranks, padding."""
    ids = np.concatenate([segments(300, 17, 40, size=400), segments(400, size=400)])
    graphdef, params = random_layer(replace(WIDE, num_heads=1), WIDTH)
    x, d_y = normal(2, 400, WIDTH), normal(2, 400, WIDTH, seed=1)
    x[ids == 0] = 1e4  # padding may hold anything
    kernels = functools.partial(mla.context_attention, backend="pallas_tpu")
    nan = pltpu.InterpretParams(uninitialized_memory="nan")
    with (
        mock.patch.object(mla, "context_attention", kernels),
        pltpu.force_tpu_interpret_mode(nan),
    ):
        run, places = split.__wrapped__(graphdef, 2)
        got = jax.device_get(run(*map(jax.device_put, (params, x, ids, d_y), places)))
    assert "pallas_tpu" in dispatch.used("mla_pairs")
    want, want_grads = unsharded(graphdef)(params, x, ids, d_y)
    assert_close(got[0], want)
    assert_close(got[1], want_grads, "float32_grad")
