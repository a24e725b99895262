"""The Triton kernels of gated MLA's attention against the definition in float64: compiled on a GPU,
elsewhere interpreted over memory filled with NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.pallas_kernels.mla_attention import mla_attention, triton_gpu
from tests.pallas_kernels.test_mla_attention import compare, definition, ids, normal, program
from tests.pallas_kernels.test_mla_attention import results as run

results = functools.partial(run, backend="triton_gpu")


@pytest.fixture(params=["as they are", "keys wider"])
def blocks(request, monkeypatch):
    """The blocks of float32 inputs; and such that one of keys spans several of queries."""
    if request.param == "keys wider":
        wider = triton_gpu.Blocks(queries=16, keys=32, num_warps=4, stages=1, group=2)
        monkeypatch.setattr(triton_gpu, "FULL", triton_gpu.Plan(wider, wider, wider))
    program.clear_cache()
    yield
    program.clear_cache()


@pytest.mark.parametrize("T", [1, 15, 16, 17, 33, 101])
def test_lengths_around_blocks(T, blocks):
    arrays = normal(T)
    compare(results(arrays), definition(arrays))


def test_documents_and_padding_of_nan(blocks):
    """KF-046, KF-048: padding left, right and in the middle; NaN there, zeros out of it."""
    rows = (
        ids((0, 12), (1, 60), (2, 33), (0, 24), (3, 1), (4, 31), (0, 19)),
        ids((7, 128), (9, 52)),
    )
    segment_ids = np.concatenate(rows)
    arrays = normal(180, H=3, B=2, seed=1)
    want = definition(arrays, segment_ids)
    real = segment_ids > 0
    poisoned = [np.where(real.reshape(2, 180, *[1] * (x.ndim - 2)), x, np.nan) for x in arrays]
    got = results(poisoned, segment_ids)
    compare(got, want)
    for name in ("o", "d_q", "d_k", "d_k_shared", "d_v"):
        assert not got[name][~real].any(), name


def test_a_document_is_alone():
    """KF-048: what precedes a document does not change a bit of it, nor get a gradient from it."""
    segment_ids = ids((1, 70), (2, 58))
    arrays = normal(128, seed=2)
    arrays[4][:, :70] = 0
    changed = [x.copy() for x in arrays]
    for x in changed[:4]:
        x[:, :70] = 7.0
    before, after = (results(x, segment_ids) for x in (arrays, changed))
    for name in before:
        if name != "top":
            np.testing.assert_array_equal(before[name][:, 70:], after[name][:, 70:], name)
            if name != "o":
                assert not before[name][:, :70].any(), name
    assert np.abs(before["o"][:, :70] - after["o"][:, :70]).max() > 0.1


def test_nothing_but_padding():
    arrays = [np.full_like(x, np.nan) for x in normal(50)]
    got = results(arrays, np.zeros((1, 50), np.int32))
    assert not any(np.asarray(x).any() for x in got.values())


def test_extreme_logits():
    """Logits up to +-1e4."""
    arrays = normal(150, seed=3, scale=2.5e3)
    want = definition(arrays)
    assert want["top"].max() > 8e3
    # A logit of 1e4 in float32 is known to 1e-3 only.
    compare(results(arrays), want, limit=2e-3)


def test_a_late_key_towers():
    """The running maximum rises by 1000 nats after the blocks without a mask."""
    arrays = normal(130, seed=4)
    arrays[0][:, 96:, :, 0] = 100.0
    arrays[1][:, 3, :, 0] = 1000.0 / (100 * 192**-0.5)
    compare(results(arrays), definition(arrays), limit=1e-4)


@pytest.mark.parametrize("dtype, limit", [("bfloat16", 7e-3), ("float16", 1e-3)])
def test_16_bit(dtype, limit):
    """Errors in norm of the dtype's size, of which logits and outputs have none."""
    segment_ids = ids((1, 150), (0, 9), (2, 141))
    arrays = normal(300, H=2, seed=5)
    arrays[3] = arrays[3] + 1  # v has a mean: dp and delta have it in common
    got = results(arrays, segment_ids, dtype=dtype)
    want = definition(arrays, segment_ids, dtype=dtype)
    assert got["o"].dtype == np.float32
    assert got["d_q"].dtype == jnp.dtype(dtype)
    compare({"top": got["top"]}, {"top": want["top"]}, limit=1e-6)
    compare(got, want, limit)


@pytest.mark.parametrize("N, R, V", [(64, 32, 64), (32, 16, 32), (24, 8, 40), (128, 64, 96)])
def test_other_widths(N, R, V):
    arrays = normal(50, H=2, seed=7, N=N, R=R, V=V)
    compare(results(arrays), definition(arrays))


def test_a_negative_scale():
    q, k, s, v, _ = normal(40, H=2, seed=8)
    got, want = (
        mla_attention(q, k, s, v, scale=-0.1, backend=name) for name in ("triton_gpu", "reference")
    )
    compare({"o": got[0], "top": got[1]}, {"o": want[0], "top": want[1]})


def test_the_same_bits_again():
    arrays = normal(300, H=4, seed=9)
    first, second = (results(arrays, dtype="bfloat16") for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True])
def test_long_rows(documents):
    """Every block size as it is, many heads at once, against plain JAX."""
    arrays = normal(3000, H=18, B=2, seed=10)
    lengths = (1, 700, 0, 1), (2, 1300, 1, 899)  # of documents and the padding behind each
    runs = [[(0, n) if i % 2 else (i + 1, n) for i, n in enumerate(x)] for x in lengths]
    runs[0].append((9, 3000 - sum(lengths[0])))
    runs[1].append((9, 3000 - sum(lengths[1])))
    segment_ids = np.concatenate([ids(*x) for x in runs]) if documents else None
    got = results(arrays, segment_ids, dtype="bfloat16")
    want = run(arrays, segment_ids, backend="chunked", dtype="bfloat16")
    compare(got, jax.tree.map(lambda x: np.asarray(x, np.float64), want), limit=1e-2)


def test_documents_are_runs():
    starts, ends = triton_gpu.bounds(
        jnp.asarray(ids((0, 2), (5, 3), (2, 1), (0, 1), (3, 2))), (1, 9)
    )
    assert starts.tolist() == [[9, 9, 2, 2, 2, 5, 9, 7, 7]]
    assert ends.tolist() == [[0, 0, 5, 5, 5, 6, 0, 9, 9]]
    starts, ends = triton_gpu.bounds(None, (2, 3))
    assert starts.tolist() == [[0, 0, 0]] * 2
    assert ends.tolist() == [[3, 3, 3]] * 2


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"N": 160}, "N = 160"),
        ({"V": 192}, "V = 192"),
        ({"R": 128}, "R = 128"),
        ({"R": 0}, "R = 0"),
        ({"dtype": "float64"}, "float64"),
    ],
)
def test_what_the_kernels_decline(change, reason):
    def shapes(N=128, R=64, V=128, dtype="bfloat16"):
        x = (1, 8, 2)
        all_shapes = ((*x, N + R), (*x, N), (1, 8, R), (*x, V))
        with jax.enable_x64(True):
            return [jax.ShapeDtypeStruct(shape, dtype) for shape in all_shapes]

    assert reason in triton_gpu.unsupported(*shapes(**change))
    assert triton_gpu.unsupported(*shapes()) is None
