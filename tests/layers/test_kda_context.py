"""KDA on rows that ranks share equals KDA on whole rows: outputs, caches, gradients, and its cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from k3jax.layers import kda_context
from k3jax.layers.kda import KDACache, KimiDeltaAttention
from k3jax.pallas_kernels.kda import kda
from k3jax.sharding import context_parallel
from k3jax.sharding.annotate import region
from k3jax.sharding.mesh import MeshConfig, make_mesh
from k3jax.sharding.rules import logical_axes, state_specs
from k3jax.testing import TOLERANCE, assert_close, random_layer
from tests.layers.helpers import TINY_KDA, normal, segments
from tests.sharding.collectives import collectives
from tests.sharding.test_context_parallel import collective_bytes

pytestmark = [pytest.mark.devices, pytest.mark.usefixtures("collectives")]
__all__ = ["collectives"]

WIDTH, T = 8, 128
ROWS, TOKENS = P("data"), P("data", "context")
GRAPHDEF, PARAMS = random_layer(TINY_KDA, WIDTH)
# Head 0 remembers for hundreds of tokens, so that memories cross several ranks.
PARAMS["dt_bias"] = PARAMS["dt_bias"] + np.array([[-6.0], [0.0]], np.float32)
AXES = logical_axes(nnx.merge(GRAPHDEF, PARAMS))


def with_padding(ids, *spans):
    for begin, end in spans:
        ids[..., begin:end] = 0
    return ids


# Documents of 8 rows: windows have 64, 32 or 16 tokens on 2, 4 or 8 ranks.
DOCUMENTS = np.concatenate(
    [
        segments(T, size=T),
        segments(64, 64, size=T),  # a start exactly at a boundary of every partition
        segments(65, 63, size=T),  # KF-014
        segments(10, 110, size=T),  # three whole ranks and more, then padding
        segments(15, 2, 14, 2, 60, 33, size=T),  # 1 or 2 tokens of a document at either side
        with_padding(segments(70, 58, size=T), (14, 18), (60, 75), (95, 97), (120, 128)),
        with_padding(segments(5, 123, size=T), (0, 33)),  # empty windows, then a later document
        np.zeros((1, T), np.int32),
    ]
)


class Regated(KimiDeltaAttention):
    """Another gate as far as the layer can know."""

    def log_decay(self, z):
        return super().log_decay(z)


class Remixed(KimiDeltaAttention):
    """Another recurrence as far as the layer can know."""

    def mix(self, q, k, v, g, beta, state, segment_ids):
        return super().mix(q, k, v, g, beta, state, segment_ids)


@functools.cache
def graphdef(layer):
    def build():
        return layer(TINY_KDA, WIDTH, rngs=nnx.Rngs(0), param_dtype="float32", init_std=0.02)

    return jax.eval_shape(lambda: nnx.split(build()))[0]


def pull(function):
    """(y, cache) and the gradients of parameters, x and cache."""

    def run(params, x, ids, cache, d_y, d_cache):
        def layer(params, x, cache):
            return function(params, x, ids, cache)

        out, vjp = jax.vjp(layer, params, x, cache)
        return out, vjp((d_y, d_cache))

    return run


def layer_on(layer):
    return lambda params, *args: nnx.merge(graphdef(layer), params)(*args)


@functools.cache
def whole(layer=KimiDeltaAttention):
    """Without a mesh."""
    return jax.jit(pull(layer_on(layer)))


@functools.cache
def shared(ranks, layer=KimiDeltaAttention, rows=8, most_gathered=8):
    """The same in a region, `ranks` of which share each row; takes and gives whole arrays."""
    assert most_gathered == context_parallel.MOST_GATHERED
    ways = min(8 // ranks, rows)
    mesh = make_mesh(MeshConfig(data=ways, context=ranks), jax.devices()[: ways * ranks])
    specs = (state_specs(PARAMS, AXES, mesh.shape), TOKENS, ROWS, ROWS)
    in_specs = (*specs, TOKENS, ROWS)
    run = jax.jit(pull(region(layer_on(layer), mesh, specs, (TOKENS, ROWS))))

    def place(*args):
        def put(spec, arg):
            return jax.tree.map(lambda a: jax.device_put(a, jax.NamedSharding(mesh, spec)), arg)

        is_spec = lambda s: isinstance(s, P)  # noqa: E731
        return [
            jax.tree.map(put, s, a, is_leaf=is_spec) for s, a in zip(in_specs, args, strict=True)
        ]

    return run, place


def call(ranks, *args, layer=KimiDeltaAttention):
    run, place = shared(ranks, layer, len(args[1]), context_parallel.MOST_GATHERED)
    return jax.device_get(run(*place(*args)))


def batch(size=T, ids=DOCUMENTS, seed=0):
    """x and d_y; padding holds large numbers, and its outputs count for nothing."""
    x, d_y = normal(len(ids), size, WIDTH, seed=seed), normal(len(ids), size, WIDTH, seed=seed + 1)
    real = (ids > 0)[..., None]
    return np.where(real, x, 1e3), d_y


@pytest.fixture(scope="module")
def want():
    x, d_y = batch()
    return jax.device_get(whole()(PARAMS, x, DOCUMENTS, None, d_y, None))


def check(got, want, what):
    (out, grads), (out_want, grads_want) = got, want
    assert_close(out, out_want, what=f"{what}, outputs")
    assert_close(grads, grads_want, "float32_grad", what=f"{what}, gradients")


@pytest.mark.parametrize(("ranks", "most_gathered"), [(1, 8), (2, 8), (4, 2), (8, 8)])
def test_outputs_and_gradients_equal_the_whole_row(want, ranks, most_gathered, monkeypatch):
    """On 4 ranks by the scan that serves many, otherwise by gathering."""
    monkeypatch.setattr(context_parallel, "MOST_GATHERED", most_gathered)
    x, d_y = batch()
    got = call(ranks, PARAMS, x, DOCUMENTS, None, d_y, None)
    check(got, want, f"{ranks} ranks")
    for row, ids in enumerate(DOCUMENTS):  # a row with small numbers is as right as others
        assert_close(got[1][1][row], want[1][1][row], "float32_grad", what=f"row {row}")
        assert not got[0][0][row][ids == 0].any()


def test_memories_cross_ranks(want):
    """What makes the others mean something: much of the late outputs comes from early ranks."""
    x, d_y = batch()
    late = np.where(np.arange(T)[:, None] >= 112, d_y, 0)
    _, (_, d_x, _) = call(8, PARAMS, x, DOCUMENTS, None, late, None)
    size = np.abs(d_x[0]).max(-1)
    assert size[:16].max() > 0.01 * size[112:].max()
    assert not d_x[1][:64].any()  # of the document before


@pytest.mark.parametrize("layer", [Regated, Remixed])
def test_variants(want, layer, caplog):
    """A gate of its own takes the same way; a recurrence of its own runs on whole rows."""
    x, d_y = batch()
    with caplog.at_level("INFO", "k3jax"):
        got = call(4, PARAMS, x, DOCUMENTS, None, d_y, None, layer=layer)
    check(got, want, layer.__name__)
    slow = [m for m in caplog.messages if "every context rank runs it on whole rows" in m]
    assert len(slow) == (layer is Remixed), caplog.messages
    assert all("Remixed.mix" in m for m in slow)


def test_extreme_gates():
    """Every g is -5: transitions underflow to 0, and nothing becomes NaN."""
    params = PARAMS | {"dt_bias": np.full_like(PARAMS["dt_bias"], 1e4)}
    x, d_y = batch()
    want = jax.device_get(whole()(params, x, DOCUMENTS, None, d_y, None))
    got = call(8, params, x, DOCUMENTS, None, d_y, None)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(got))
    check(got, want, "g = -5")


def test_finite_differences_of_the_tokens_before_a_boundary(want):
    """The 3 tokens in front of rank 1, whose gradients come back over the halo and the memory."""
    x, d_y = batch()
    late = np.where(np.arange(T)[:, None] >= 64, d_y, 0)
    direction = np.zeros_like(x)
    direction[0, 61:64] = normal(3, WIDTH, seed=9)

    def loss(step):
        (y, _), _ = call(2, PARAMS, x + np.float32(step) * direction, DOCUMENTS, None, late, None)
        return float((y.astype(np.float64) * late).sum())

    _, (_, d_x, _) = call(2, PARAMS, x, DOCUMENTS, None, late, None)
    slope = (loss(0.02) - loss(-0.02)) / 0.04
    assert abs(slope) > 0.1
    np.testing.assert_allclose((d_x * direction).sum(), slope, rtol=1e-2)


def test_with_a_memory_in_front_of_the_row():
    """A chunk of a longer prompt on 8 ranks: windows of 2 tokens, less than the convolution sees.

    The cache after the row is the same on all ranks, whichever has the last real token.
    """
    size = 16
    ids = segments(16, size=size, rows=8)
    for row, length in enumerate((16, 15, 9, 8, 2, 1, 0)):
        ids[row, length:] = 0
    ids[7] = segments(7, 9, size=size)
    x, d_y = batch(size, ids)
    cache = KDACache(normal(8, 3, 3, 2, 8, seed=2), normal(8, 2, 8, 8, seed=3))
    d_cache = KDACache(normal(8, 3, 3, 2, 8, seed=4), normal(8, 2, 8, 8, seed=5))
    args = PARAMS, x, ids, cache, d_y, d_cache
    want = jax.device_get(whole()(*args))
    got = call(8, *args)
    check(got, want, "with a cache")
    np.testing.assert_array_equal(got[0][1].conv[6], cache.conv[6])  # nothing but padding
    np.testing.assert_array_equal(got[0][1].state[6], cache.state[6])


def test_bfloat16_operands(want):
    """As near to float32 as whole rows in bfloat16 are."""
    x, _ = batch()
    mesh = make_mesh(MeshConfig(data=2, context=4))
    specs = (state_specs(PARAMS, AXES, mesh.shape), TOKENS, ROWS)
    args = PARAMS, jnp.asarray(x, "bfloat16"), DOCUMENTS

    def forward(*args):
        return layer_on(KimiDeltaAttention)(*args)[0]

    _, place = shared(4)
    y = jax.jit(region(forward, mesh, specs, TOKENS))(*place(*args, None, None, None)[:3])
    assert y.dtype == jnp.bfloat16
    whole_rows = jax.jit(forward)(*args)
    handed_on = (slice(None), slice(T // 4, None))  # what depends on an earlier rank
    errors = [
        np.linalg.norm((np.asarray(a, np.float32) - want[0][0])[handed_on]) for a in (y, whole_rows)
    ]
    assert errors[0] < 1.1 * errors[1] < 0.1 * np.linalg.norm(want[0][0][handed_on]), errors


def test_one_exchange_of_fixed_size_each_way():
    """The program's communication does not depend on T, and a memory travels once each way."""
    mesh = make_mesh(MeshConfig(data=2, context=4))
    specs = state_specs(PARAMS, AXES, mesh.shape), TOKENS, ROWS, ROWS, TOKENS, ROWS
    outs = (TOKENS, ROWS), (specs[0], TOKENS, ROWS)  # of replicated weights only a share
    run = jax.jit(region(pull(layer_on(KimiDeltaAttention)), mesh, specs, outs))
    found, (_, place) = {}, shared(4)
    for size in (T, 2 * T):
        ids = segments(size, size=size, rows=8)
        x, d_y = batch(size, ids)
        text = run.lower(*place(PARAMS, x, ids, None, d_y, None)).compile().as_text()
        found[size] = collective_bytes(text)
    assert found[T] == found[2 * T]
    memories = (4, 4, 2, 8, 8 + 8)  # ranks, rows, heads, K, K + V: M and E
    assert found[T]["all-gather", memories] == (2, 4 * np.prod(memories))
    others = [shape for (_, shape) in found[T] if shape != memories]
    assert all(np.prod(shape) < np.prod(memories) / 4 for shape in others), found[T]


def test_kf_015_errors_do_not_grow_with_the_ranks():
    """Slow decay, 8 x 256 tokens: the products of transitions stay exact."""
    size, H, K = 8 * 256, 2, 16
    q, k, v = (normal(1, size, H, K, seed=n) for n in range(3))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (q * K**-0.5, k))
    g = -1e-3 * np.abs(normal(1, size, H, K, seed=3))
    beta = 0.02 / (1 + np.exp(-normal(1, size, H, seed=4)))
    state, d_o = normal(1, H, K, K, seed=5), normal(1, size, H, K, seed=6)
    arrays = q, k, v, g, beta

    def on(ranks):
        def run(arrays, state, d_o):
            def op(*args):
                *arrays, state = args
                options = {"g_min": None, "chunk_size": 64, "backend": None}
                op = kda if ranks == 1 else kda_context.kda
                return op(*arrays, state=state, segment_ids=None, **options)

            (o, last), vjp = jax.vjp(op, *arrays, state)
            d = vjp((d_o, jnp.ones_like(last) / ranks))
            return last, d[1]

        if ranks == 1:
            return jax.device_get(jax.jit(run)(arrays, state, d_o))
        mesh = make_mesh(MeshConfig(data=1, context=ranks), jax.devices()[:ranks])
        specs = ((TOKENS,) * 5, ROWS, TOKENS)
        put = jax.tree.map(
            lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)), (arrays, state, d_o), specs
        )
        return jax.device_get(jax.jit(region(run, mesh, specs, (ROWS, TOKENS)))(*put))

    last, d_k = on(1)
    d_k = d_k[:, :256]  # of the first of 8 ranks
    errors = {}
    for ranks in (2, 8):
        got, d_got = on(ranks)
        pairs = ((got, last), (d_got[:, :256], d_k))
        errors[ranks] = [np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]
    for two, eight in zip(errors[2], errors[8], strict=True):
        assert eight < TOLERANCE["float32_grad"], errors
        assert eight <= max(2 * two, 2e-6), errors  # below that it is one rounding or another
