"""The attention of gated MLA: every backend against the definition in float64.

The TPU kernels are interpreted over memory filled with NaN, in blocks of 128 or 256 tokens so that
short rows have several; `tests/aot` compiles them for real chips.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.mla_attention import (
    mla_attention,
    mla_decode,
    tpu_backward,
    tpu_decode,
    tpu_grid,
)
from k3jax.pallas_kernels.mla_attention.chunked import attention
from k3jax.pallas_kernels.mla_attention.pallas_tpu import unsupported
from k3jax.pallas_kernels.mla_attention.tpu_grid import document_tables, folded, unfold

BACKENDS = ("chunked", "pallas_tpu")
SCALE = 192**-0.5
NAMES = ("q", "k", "k_shared", "v")


def normal(T, H=1, *, B=1, seed=0, N=128, R=64, V=128, scale=1.0):
    """q, k, k_shared, v and a cotangent of o."""
    draw = np.random.default_rng(seed)
    shapes = ((B, T, H, N + R), (B, T, H, N), (B, T, R), (B, T, H, V), (B, T, H, V))
    arrays = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
    arrays[0] *= scale
    return arrays


@functools.partial(jax.jit, static_argnames="backend")
def program(arrays, d_o, segment_ids, backend):
    def run(*arrays):
        return mla_attention(*arrays, scale=SCALE, segment_ids=segment_ids, backend=backend)

    (o, top), pull = jax.vjp(run, *arrays)
    grads = pull((d_o.astype(o.dtype), jnp.ones_like(top)))
    return {"o": o, "top": top} | {f"d_{n}": x for n, x in zip(NAMES, grads, strict=True)}


def results(arrays, segment_ids=None, *, backend, dtype="float32"):
    """o, top and all gradients; with the TPU backend as interpreted over NaN."""
    *arrays, d_o = arrays
    arrays = [jnp.asarray(x, dtype) for x in arrays]
    nan = pltpu.InterpretParams(uninitialized_memory="nan")
    with (
        pltpu.force_tpu_interpret_mode(nan) if backend == "pallas_tpu" else contextlib.nullcontext()
    ):
        return jax.device_get(program(arrays, jnp.asarray(d_o), segment_ids, backend))


def definition(arrays, segment_ids=None, dtype="float32"):
    """The reference in float64, of inputs rounded to `dtype`."""
    *arrays, d_o = arrays
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(jnp.asarray(x, dtype), np.float64)) for x in arrays]
        ids = None if segment_ids is None else jnp.asarray(segment_ids)
        d_o = jnp.asarray(d_o, jnp.float64)
        return jax.device_get(program(wide, d_o, ids, "reference"))


def compare(got, want, limit=2e-6):
    for name, x in want.items():
        assert np.isfinite(got[name]).all(), name
        error = np.linalg.norm(np.asarray(got[name], np.float64) - x)
        assert error <= limit * max(np.linalg.norm(x), 1), (name, error, np.linalg.norm(x))


@pytest.fixture
def blocks(monkeypatch):
    """Sets the largest block of the kernels, forward and backward, for float32 inputs."""

    def set_blocks(size, backward=None):
        monkeypatch.setattr(tpu_grid, "LARGEST_BLOCK", 4 * size)
        monkeypatch.setattr(tpu_backward, "LARGEST_BLOCK", backward or size)
        program.clear_cache()

    yield set_blocks
    program.clear_cache()


def ids(*runs):
    return np.concatenate([np.full(n, i, np.int32) for i, n in runs])[None]


def test_the_reference_is_the_definition_by_hand():
    """Three tokens, two of one document: one number per channel."""
    q, k, s, v = (np.ones((1, 3, 1, n), np.float32) for n in (2, 1, 1, 1))
    k[0, :, 0, 0], v[0, :, 0, 0] = (0.0, np.log(3), 5.0), (10.0, 20.0, 30.0)
    o, top = mla_attention(
        q, k, s[:, :, 0], v, scale=1.0, segment_ids=ids((1, 2), (2, 1)), backend="reference"
    )
    np.testing.assert_allclose(o[0, :, 0, 0], [10, 0.25 * 10 + 0.75 * 20, 30], rtol=1e-6)
    np.testing.assert_allclose(top, [6.0], rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("T", [1, 127, 128, 129, 389])
def test_lengths_around_blocks(backend, T, blocks):
    """T in {1, C-1, C, C+1, 3C+5}."""
    blocks(128)
    arrays = normal(T)
    compare(results(arrays, backend=backend), definition(arrays))


@pytest.mark.parametrize("backend", BACKENDS)
def test_documents_and_padding_of_nan(backend, blocks):
    """KF-046, KF-048: padding left, right and in the middle; NaN there, zeros out of it."""
    blocks(256, 128)
    rows = (
        ids((0, 30), (1, 290), (2, 100), (0, 64), (3, 1), (4, 283), (0, 32)),
        ids((7, 512), (9, 288)),
    )
    segment_ids = np.concatenate(rows)
    arrays = normal(800, B=2, seed=1)
    want = definition(arrays, segment_ids)
    poisoned = []
    for x in arrays:
        real = segment_ids.reshape(*segment_ids.shape, *[1] * (x.ndim - 2)) > 0
        poisoned.append(np.where(real, x, np.nan if x is not arrays[4] else 3.0))
    got = results(poisoned, segment_ids, backend=backend)
    compare(got, want)
    for name in ("o", "d_q", "d_k", "d_k_shared", "d_v"):
        assert not got[name][segment_ids == 0].any(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_document_is_alone(backend, blocks):
    """KF-048: what precedes a document does not change a bit of it, nor get a gradient from it."""
    blocks(128)
    segment_ids = ids((1, 200), (2, 184))
    arrays = normal(384, seed=2)
    arrays[4][:, :200] = 0
    changed = [x.copy() for x in arrays]
    for x in changed[:4]:
        x[:, :200] = 7.0
    before, after = (results(x, segment_ids, backend=backend) for x in (arrays, changed))
    for name in before:
        if name != "top":
            np.testing.assert_array_equal(before[name][:, 200:], after[name][:, 200:], name)
            if name != "o":
                assert not before[name][:, :200].any(), name
    assert np.abs(before["o"][:, :200] - after["o"][:, :200]).max() > 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_but_padding(backend, blocks):
    blocks(128)
    got = results([np.full_like(x, np.nan) for x in normal(200)[:4]] + [normal(200)[4]],
                  np.zeros((1, 200), np.int32), backend=backend)  # fmt: skip
    assert not any(np.asarray(x).any() for x in got.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_logits(backend, blocks):
    """Logits up to +-1e4, far above what the forward kernel's first form stands."""
    blocks(256, 128)
    arrays = normal(600, seed=3, scale=2.5e3)
    want = definition(arrays)
    assert want["top"].max() > 9e3
    # A logit of 1e4 in float32 is known to 1e-3 only.
    compare(results(arrays, backend=backend), want, limit=2e-3)


def test_the_exact_form_runs_when_a_late_key_towers(blocks):
    """A key of the first block gets 1000 nats more than those on the diagonal."""
    blocks(128)
    arrays = normal(384, seed=4)
    arrays[0][:, 256:, :, 0] = 100.0
    arrays[1][:, 3, :, 0] = 1000.0 / (100 * SCALE)
    want, got = definition(arrays), results(arrays, backend="pallas_tpu")
    compare(got, want, limit=1e-4)  # float32 knows a logit of 1000 nats to 6e-5
    np.testing.assert_allclose(got["o"][0, 256:, 0], np.broadcast_to(arrays[3][:, 3, 0], (128, 128)),
                               rtol=1e-5)  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16(backend, blocks):
    """Errors in norm of bfloat16's size, of which float32 logits and outputs have none."""
    blocks(64, 128)  # 256 for bfloat16
    arrays = normal(300, H=2, seed=5)
    got, want = (
        results(arrays, backend=backend, dtype="bfloat16"),
        definition(arrays, dtype="bfloat16"),
    )
    assert got["o"].dtype == np.float32
    assert got["d_q"].dtype == jnp.bfloat16
    compare({"o": got["o"]}, {"o": want["o"]}, limit=2.5e-3)
    compare({"top": got["top"]}, {"top": want["top"]}, limit=1e-6)
    compare(got, want, limit=6e-3)


def test_bfloat16_values_with_a_mean(blocks):
    """What dp and delta have in common cancels only if both come from the same rounded d_o."""
    blocks(64, 128)
    arrays = normal(300, H=2, seed=5)
    arrays[3] = arrays[3] + 8  # v
    got = results(arrays, backend="pallas_tpu", dtype="bfloat16")
    compare(got, definition(arrays, dtype="bfloat16"), limit=1e-2)


@pytest.mark.parametrize("documents", [False, True])
def test_two_backward_kernels_of_long_rows(documents, blocks, monkeypatch):
    """Where dq of a row does not fit on chip."""
    blocks(128)
    monkeypatch.setattr(tpu_backward, "VMEM_BYTES", 0)
    segment_ids = ids((1, 150), (0, 10), (2, 224)) if documents else None
    arrays = normal(384, seed=6)
    compare(results(arrays, segment_ids, backend="pallas_tpu"), definition(arrays, segment_ids))


def test_other_widths(blocks):
    blocks(128)
    arrays = normal(200, seed=7, N=128, R=16, V=256)
    compare(results(arrays, backend="pallas_tpu"), definition(arrays))


def test_the_grid_visits_every_pair_once():
    for n in range(1, 8):
        rows, width = folded(n)
        seen = [tuple(map(int, unfold(n, r, c))) for r in range(rows) for c in range(width)]
        want = [(i, at, int(at == i)) for i in range(n) for at in range(i + 1)]
        assert sorted(seen) == want
        for (a, at, last), (b, then, _) in itertools.pairwise(seen):
            assert (b, then) == ((a, at + 1) if not last else (b, 0))  # a row is not interrupted


def test_partners_of_a_block():
    """Documents of 3, 5 and 4 tokens and padding, in blocks of 4."""
    lowest, largest, first, last = document_tables(
        jnp.asarray(ids((1, 3), (2, 5), (3, 4), (0, 4))), 4
    )
    assert lowest.tolist() == [[1, 2, 3, 0]]
    assert largest.tolist() == [[2, 2, 3, 0]]
    assert first.tolist() == [[0, 0, 2, 3]]
    assert last.tolist() == [[1, 1, 2, 3]]


def test_the_layer_form_against_a_cache_agrees():
    """`attention` with every key to each head equals `mla_attention`."""
    q, k, s, v, _ = normal(40, H=2)
    position = jnp.arange(40)[None]
    ones = jnp.ones((1, 40), jnp.int32)
    wide = np.concatenate([k, np.broadcast_to(s[:, :, None], (1, 40, 2, 64))], -1)
    where = {"q_position": position, "q_segment": ones, "k_segment": ones}
    o, top = attention(q, wide, v, scale=SCALE, **where, block=16)
    want, want_top = mla_attention(q, k, s, v, scale=SCALE, backend="reference")
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(top, want_top, rtol=1e-6)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"N": 64}, "N = 64"),
        ({"V": 192}, "V = 192"),
        ({"V": 384}, "V = 384"),
        ({"R": 0}, "R = 0"),
        ({"R": 8}, "R = 8"),
        ({"N": 256}, "Q = 320"),
        ({"dtype": "float16"}, "float16"),
    ],
)
def test_what_the_kernels_decline(change, reason):
    def shapes(N=128, R=64, V=128, dtype="bfloat16"):
        x = (1, 8, 2)
        all_shapes = ((*x, N + R), (*x, N), (1, 8, R), (*x, V))
        return [jax.ShapeDtypeStruct(shape, dtype) for shape in all_shapes]

    assert reason in unsupported(*shapes(**change))
    assert unsupported(*shapes()) is None


def test_shapes_that_do_not_fit_are_refused():
    q, k, s, v, _ = normal(8)
    with pytest.raises(ValueError, match="q has 192 channels, k and k_shared 128 \\+ 32"):
        mla_attention(q, k, s[..., :32], v, scale=1.0)
    with pytest.raises(ValueError, match="differ in rows, tokens or heads"):
        mla_attention(q, k[:, :4], s, v, scale=1.0)
    with pytest.raises(ValueError, match="segment_ids"):
        mla_attention(q, k, s, v, scale=1.0, segment_ids=np.ones((1, 7), np.int32))
    with pytest.raises(ValueError, match="unknown backend"):
        mla_attention(q, k, s, v, scale=1.0, backend="splash")


def decode_case(dtype, q_dtype=None, H=6, C=192, rank=128, size=16):
    """Queries and a cache of NaN but for the tokens of five requests, their pages in disorder."""
    draw = np.random.default_rng(8)
    lengths = np.array([0, 1, 16, 33, 150], np.int32)
    tables = np.full((5, 10), -7, np.int32)
    pages = np.full((24, size, C), np.nan, np.float32)
    free = list(draw.permutation(24))
    rows = [draw.normal(size=(n, C)).astype(np.float32) for n in lengths]
    for b, row in enumerate(rows):
        for at in range(0, len(row), size):
            tables[b, at // size] = page = free.pop()
            pages[page, : len(row[at : at + size])] = row[at : at + size]
    q = draw.normal(size=(5, H, C)).astype(np.float32)
    q, pages = jnp.asarray(q, q_dtype or dtype), jnp.asarray(pages, dtype)
    want = np.zeros((5, H, rank))
    for b, row in enumerate(rows):
        if len(row):
            row = np.asarray(jnp.asarray(row, dtype), np.float64)
            logits = 0.3 * np.asarray(q[b], np.float64) @ row.T
            p = np.exp(logits - logits.max(-1, keepdims=True))
            want[b] = p / p.sum(-1, keepdims=True) @ row[:, :rank]
    return (q, pages, jnp.asarray(tables), jnp.asarray(lengths)), want


@pytest.mark.parametrize("backend", ["gathered", "pallas_tpu"])
@pytest.mark.parametrize(
    "dtypes, limit",
    [(("float32",), 1e-6), (("bfloat16",), 4e-3), (("bfloat16", "float32"), 3e-5)],
)
def test_decoding_from_pages(backend, dtypes, limit, monkeypatch):
    """KF-043, KF-046: free slots, ragged ends, pages and table entries that must not be read."""
    monkeypatch.setattr(tpu_decode, "STEP_TOKENS", 64)
    args, want = decode_case(*dtypes)
    nan = pltpu.InterpretParams(uninitialized_memory="nan")
    with (
        pltpu.force_tpu_interpret_mode(nan) if backend == "pallas_tpu" else contextlib.nullcontext()
    ):
        o = jax.jit(functools.partial(mla_decode, scale=0.3, kv_rank=128, backend=backend))(*args)
    assert o.dtype == jnp.float32
    assert not np.asarray(o[0]).any()
    compare({"o": o}, {"o": want}, limit=limit)


@pytest.mark.parametrize(
    "q, pages, rank, reason",
    [
        ("float16", "bfloat16", 512, "q is float16"),
        ("bfloat16", "float32", 512, "q is bfloat16"),
        ("bfloat16", "float16", 512, "pages are float16"),
        ("bfloat16", "bfloat16", 500, "kv_rank = 500"),
        ("bfloat16", "bfloat16", 512, None),
    ],
)
def test_what_the_decoding_kernel_declines(q, pages, rank, reason):
    q, pages = jax.ShapeDtypeStruct((1, 96, 576), q), jax.ShapeDtypeStruct((4, 64, 576), pages)
    found = tpu_decode.unsupported(q, pages, rank)
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize("size, reason", [(20, "multiple of 16"), (32_768, "do not fit")])
def test_pages_that_the_decoding_kernel_declines(size, reason):
    q, pages = (jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1, 96, 576), (4, size, 576)))
    assert reason in tpu_decode.unsupported(q, pages, 512)


def test_wider_cache_rows():
    args, want = decode_case("float32")
    q, pages, *where = args
    pages = jnp.pad(pages, ((0, 0), (0, 0), (0, 64)))
    o = mla_decode(q, pages, *where, scale=0.3, kv_rank=128, backend="gathered")
    compare({"o": o}, {"o": want})


def test_decoding_shapes_that_do_not_fit_are_refused():
    (q, pages, table, lengths), _ = decode_case("float32")
    with pytest.raises(ValueError, match="q has 192 channels"):
        mla_decode(q, pages[..., 1:], table, lengths, scale=1.0, kv_rank=128)
    with pytest.raises(ValueError, match="5 queries"):
        mla_decode(q, pages, table[1:], lengths, scale=1.0, kv_rank=128)
