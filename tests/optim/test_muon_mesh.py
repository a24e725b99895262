"""Muon on a mesh: the layout of a weight changes where the work is done, never the update."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from k3jax.optim import muon
from k3jax.optim.build import OptimConfig, build_optimizer
from k3jax.optim.muon import Blocks, orthogonalize, path_name, scale_by_per_head_muon
from k3jax.optim.qk_clip import qk_clip

AXES = ("data", "fsdp", "expert", "context", "tensor")
MATRIX, PER_HEAD = Blocks((-2,), (-1,)), Blocks((-3,), (-1,))
INTO_HEADS, OUT_OF_HEADS = Blocks((-3,), (-2, -1)), Blocks((-3, -2), (-1,))
pytestmark = pytest.mark.devices


def mesh_of(*sizes):
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * 5, devices=devices)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def error(actual, wanted):
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    return np.abs(actual - wanted).max() / np.abs(wanted).max()


# --------------------------------------------------------------------------------------- one update

LAYOUTS = {  # shape, blocks, sharding; [layers, ...]
    "mlp": ((5, 16, 24), MATRIX, (None, "fsdp", "tensor")),
    "alone": ((1, 16, 8), MATRIX, (None, "fsdp", None)),
    "two_axes": ((3, 32, 8), MATRIX, (None, ("fsdp", "context"), "tensor")),
    "q": ((3, 16, 8, 6), PER_HEAD, (None, "fsdp", "tensor", None)),
    "kv_b": ((3, 16, 8, 8), PER_HEAD._replace(cuts=(3,)), (None, "fsdp", "tensor", "context")),
    "g": ((2, 16, 8, 3), INTO_HEADS, (None, "fsdp", "tensor", None)),
    "o": ((2, 8, 3, 16), OUT_OF_HEADS, (None, "tensor", None, "fsdp")),
    "experts": ((2, 8, 16, 24), MATRIX, (None, "expert", "fsdp", "tensor")),
}
INPUTS = {name: normal(*shape, seed=i) for i, (name, (shape, *_)) in enumerate(LAYOUTS.items())}
MESHES = [
    (1, 1, 1, 1, 1), (8, 1, 1, 1, 1), (1, 8, 1, 1, 1), (1, 1, 8, 1, 1), (1, 1, 1, 8, 1),
    (1, 1, 1, 1, 8), (2, 4, 1, 1, 1), (1, 4, 1, 1, 2), (1, 2, 1, 1, 4), (1, 2, 2, 1, 2),
    (2, 2, 1, 1, 2), (1, 1, 2, 2, 2), (2, 2, 2, 1, 1),
]  # fmt: skip


def all_updates(inputs):
    return {name: orthogonalize(x, LAYOUTS[name][1]) for name, x in inputs.items()}


@pytest.fixture(scope="module")
def on_one_device():
    return jax.jit(all_updates)(INPUTS)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_kf_089_updates_do_not_depend_on_the_mesh(sizes, on_one_device):
    mesh = mesh_of(*sizes)
    places = {
        name: NamedSharding(mesh, PartitionSpec(*spec)) for name, (*_, spec) in LAYOUTS.items()
    }
    with jax.set_mesh(mesh):
        updates = jax.jit(all_updates)(jax.device_put(INPUTS, places))
    for name, update in updates.items():
        assert error(update, on_one_device[name]) < 1e-5, name
        assert update.sharding.is_equivalent_to(places[name], update.ndim), name


def test_bfloat16_on_a_mesh_is_as_near_to_the_exact_update_as_on_one_device():
    x, spec = normal(4, 64, 128), PartitionSpec(None, "fsdp", "tensor")
    sharded = jax.device_put(x, NamedSharding(mesh_of(1, 4, 1, 1, 2), spec))
    exact = np.asarray(orthogonalize(x, MATRIX))
    one, many = (np.asarray(orthogonalize(a, MATRIX, "bfloat16")) for a in (x, sharded))
    distance = [np.linalg.norm(o - exact) / np.linalg.norm(exact) for o in (one, many)]
    assert distance[1] < 1.2 * distance[0] < 0.1


def test_kf_093_zero_blocks_and_padding_stay_zero():
    x = normal(3, 16, 8)
    x[1] = 0
    place = NamedSharding(mesh_of(1, 4, 1, 1, 2), PartitionSpec(None, "fsdp", "tensor"))
    for ns_dtype in ("float32", "bfloat16"):
        update = np.asarray(orthogonalize(jax.device_put(x, place), MATRIX, ns_dtype))
        assert np.isfinite(update).all()
        assert not update[1].any()
        assert np.abs(update[[0, 2]]).max() > 0.1


# ------------------------------------------------------------------------------- the whole optimizer

PREFIX = "layers_0_to_1/layer_0"
TREE = {  # path: shape, sharding
    "embed_tokens/embedding": ((24, 16), (None, "fsdp")),
    "norm/weight": ((16,), ()),
    f"{PREFIX}/self_attn/q_b_proj/kernel": ((2, 16, 4, 6), (None, "fsdp", "tensor", None)),
    f"{PREFIX}/self_attn/kv_b_proj/kernel": ((2, 16, 4, 7), (None, "fsdp", "tensor", None)),
    f"{PREFIX}/self_attn/o_proj/kernel": ((2, 4, 4, 16), (None, "tensor", None, "fsdp")),
    f"{PREFIX}/self_attn/A_log": ((2, 4), (None, "tensor")),
    f"{PREFIX}/mlp/up_proj/kernel": ((2, 16, 8), (None, "fsdp", "tensor")),
}


def nest(leaves):
    tree = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def test_kf_097_init_and_update_under_jit_with_donated_state():
    params = nest(
        {path: normal(*shape, seed=i) for i, (path, (shape, _)) in enumerate(TREE.items())}
    )
    cfg = OptimConfig(ns_dtype="float32", clip_norm=50.0)  # of norms 35, 75, 113
    optimizer = build_optimizer(cfg, params, qk_nope_dim=3)

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)
        attention = params["layers_0_to_1"]["layer_0"]["self_attn"]
        logits = jnp.array([[1.0, 200, 1, 300], [100, 101, 1, 1]])
        clipped = qk_clip(attention, logits, limit=100.0, qk_nope_dim=3)
        params = {**params, "layers_0_to_1": {"layer_0": {
            **params["layers_0_to_1"]["layer_0"], "self_attn": clipped}}}  # fmt: skip
        return params, state, optax.tree.norm(grads)

    def gradients(t):
        return jax.tree.map(lambda p: (t + 1) * np.sin(p * (t + 1)), params)

    alone, state = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    for t in range(3):
        alone, state, norm = jax.jit(step)(alone, state, gradients(t))

    mesh = mesh_of(1, 2, 1, 1, 2)
    specs = {path: NamedSharding(mesh, PartitionSpec(*spec)) for path, (_, spec) in TREE.items()}
    places, scalar = nest(specs), NamedSharding(mesh, PartitionSpec())

    def place_of(path, leaf):  # a moment's path ends in its parameter's
        name = path_name(path)
        return next((place for path, place in specs.items() if name.endswith(path)), scalar)

    with jax.set_mesh(mesh):
        sharded = jax.device_put(params, places)
        born = jax.jit(optimizer.init, in_shardings=(places,))(sharded)
        moments = jax.tree.map_with_path(place_of, born)
        placed = [leaf.sharding for leaf in jax.tree.leaves(born)]
        # not asked for: the state follows its parameters by itself
        assert all(
            have.is_equivalent_to(want, leaf.ndim)
            for have, want, leaf in zip(
                placed, jax.tree.leaves(moments), jax.tree.leaves(born), strict=True
            )
        )
        assert sum(not p.is_fully_replicated for p in placed) == 8  # 2 x 2 of Adam, 4 of Muon
        train = jax.jit(
            step,
            in_shardings=(places, moments, places),
            out_shardings=(places, moments, scalar),
            donate_argnums=(0, 1),
        )
        for t in range(3):
            old = (sharded, born)
            sharded, born, sharded_norm = train(sharded, born, jax.device_put(gradients(t), places))
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    np.testing.assert_allclose(sharded_norm, norm, rtol=1e-5)
    for have, want in zip(
        jax.tree.leaves((sharded, born)), jax.tree.leaves((alone, state)), strict=True
    ):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def test_kf_089_one_and_ten_steps_of_a_64_by_32_matrix():
    path = f"{PREFIX}/mlp/up_proj/kernel"
    weight, noise = normal(1, 64, 32), normal(10, 1, 64, 32, seed=1)
    cfg = OptimConfig(ns_dtype="float32", clip_norm=1.0)
    optimizer = build_optimizer(cfg, nest({path: weight}), qk_nope_dim=1)

    def train(weight, noise):
        def step(carry, g):
            params, state = carry
            grads = jax.tree.map(lambda p: p + g, params)
            updates, state = optimizer.update(grads, state, params)
            params = jax.tree.map(lambda p, u: p - 0.02 * u, params, updates)
            return (params, state), jax.tree.leaves(params)[0]

        params = nest({path: weight})
        return jax.lax.scan(step, (params, optimizer.init(params)), noise)[1]

    wanted = np.asarray(jax.jit(train)(weight, noise))
    assert np.abs(wanted[9] - weight).max() > 0.05
    rows_by_fsdp, rows_by_tensor = ("fsdp", "tensor"), ("tensor", "fsdp")
    for fsdp, tensor, spec in (
        (1, 1, rows_by_fsdp), (2, 1, rows_by_fsdp), (1, 2, rows_by_fsdp),
        (2, 2, rows_by_fsdp), (4, 2, rows_by_fsdp), (4, 2, rows_by_tensor),
    ):  # fmt: skip
        mesh = mesh_of(1, fsdp, 1, 1, tensor)
        with jax.set_mesh(mesh):
            place = partial(NamedSharding, mesh)
            result = jax.jit(train)(
                jax.device_put(weight, place(PartitionSpec(None, *spec))),
                jax.device_put(noise, place(PartitionSpec(None, None, *spec))),
            )
        for t in (0, 9):
            np.testing.assert_allclose(
                result[t], wanted[t], atol=1e-5, err_msg=f"{fsdp}x{tensor} {spec}"
            )


# ------------------------------------------------------------------------------------ communication

COLLECTIVE = r"(all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("


def collectives(hlo):
    """Names of the collectives of a compiled program: (outside of loops, inside)."""
    bodies, name = {}, None
    for line in hlo.splitlines():
        if (head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line)) is not None:
            name = head[1]
            bodies[name] = []
        elif name is not None:
            bodies[name].append(line)
    inside, todo = set(), re.findall(r"(?:body|condition)=%?([\w.\-]+)", hlo)
    assert todo, "no loop was found"
    while todo:
        inside.add(name := todo.pop())
        called = re.findall(
            r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", "\n".join(bodies[name])
        )
        todo += [c for c in called if c not in inside]
    found = ([], [])
    for name, lines in bodies.items():
        for line in lines:
            found[name in inside].extend(re.findall(COLLECTIVE, line))
    return found


def compiled(fn, shape, sizes, *spec):
    mesh = mesh_of(*sizes)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
    with jax.set_mesh(mesh):
        return jax.jit(fn).lower(x).compile()


def muon_step(x):
    transform = scale_by_per_head_muon(
        {"w": MATRIX}, momentum=0.95, nesterov=True, ns_dtype="bfloat16"
    )
    return transform.update({"w": x}, transform.init({"w": x}))


@pytest.mark.parametrize(
    "sizes, spec, wanted",
    [
        ((1, 8, 1, 1, 1), (None, "fsdp", None), ["all-to-all"] * 2),
        ((1, 1, 1, 1, 8), (None, None, "tensor"), ["all-to-all"] * 2),
        ((1, 2, 1, 1, 4), (None, "fsdp", "tensor"), ["all-to-all"] * 2),
        ((1, 1, 8, 1, 1), ("expert", None, None), []),
        ((8, 1, 1, 1, 1), (None, None, None), ["all-gather"]),
        ((2, 4, 1, 1, 1), (None, "fsdp", None), ["all-to-all"] * 2 + ["all-gather"]),
    ],
)
def test_kf_098_no_collective_in_the_iterations_and_one_exchange_each_way(sizes, spec, wanted):
    outside, inside = collectives(compiled(muon_step, (8, 512, 2048), sizes, *spec).as_text())
    assert inside == []
    assert sorted(outside) == sorted(wanted)


def test_kf_098_the_count_sees_a_collective_in_a_loop():
    def gram(x):  # what must not happen: an iteration on parts
        def product(_, x):
            y = jnp.einsum("nab,ncb->nac", x, x, out_sharding=PartitionSpec(None, None, None))
            return jnp.einsum("nac,ncb->nab", y, x)

        return jax.lax.fori_loop(0, 5, product, x)

    program = compiled(gram, (2, 16, 32), (1, 8, 1, 1, 1), None, None, "fsdp")
    assert "all-reduce" in collectives(program.as_text())[1]


def test_an_owner_works_on_a_few_matrices_at_a_time(monkeypatch):
    def temporary(portion):  # in units of the 8 matrices that each device owns
        monkeypatch.setattr(muon, "PORTION", portion)
        orthogonalize.clear_cache()  # PORTION is read while tracing
        program = compiled(
            lambda x: orthogonalize(x, MATRIX), (64, 256, 256), (1, 8, 1, 1, 1), None, "fsdp"
        )
        return program.memory_analysis().temp_size_in_bytes / (4 * 8 * 256**2)

    assert temporary(256**2) < 2.1  # what was received and what will be sent
    assert temporary(2**26) > 2.9
    orthogonalize.clear_cache()


@pytest.mark.parametrize("portion", [1, 3 * 16 * 6, 5 * 16 * 6])
def test_portions_change_nothing(portion, monkeypatch):
    x = normal(5, 16, 6)
    monkeypatch.setattr(muon, "PORTION", portion)
    o = muon._in_portions(jnp.asarray(x), MATRIX, "float32")
    assert error(0.8 * o, orthogonalize(x, MATRIX)) < 1e-5  # 0.2 sqrt(16)


# ---------------------------------------------------------------------------- what does not divide


@pytest.mark.parametrize(
    "shape, sizes, spec",
    [
        ((18, 16, 8), (1, 8, 1, 1, 1), (None, "fsdp", None)),  # 18 matrices on 8 owners
        ((72, 16, 8), (2, 4, 1, 1, 1), (None, "fsdp", None)),
        ((1, 72, 16), (1, 8, 1, 1, 1), (None, "fsdp", None)),  # 9 rows on a device
        ((1, 3, 16, 8), (1, 4, 1, 1, 1), (None, None, "fsdp", None)),  # 3 experts on 4 owners
    ],
)
def test_kf_099_counts_that_do_not_divide_are_padded(shape, sizes, spec):
    x = normal(*shape)
    place = NamedSharding(mesh_of(*sizes), PartitionSpec(*spec))
    update = orthogonalize(jax.device_put(x, place), MATRIX)
    assert error(update, orthogonalize(x, MATRIX)) < 1e-5


@pytest.mark.parametrize(
    "shape, sizes, spec",
    [
        ((18, 16), (1, 8, 1, 1, 1), ("fsdp", None)),  # 18 rows over 8
        ((1, 3, 16, 8), (1, 1, 4, 1, 1), (None, "expert", None, None)),  # 3 experts over 4
    ],
)
def test_kf_099_parts_that_do_not_divide_are_refused_before_compiling(shape, sizes, spec):
    place = NamedSharding(mesh_of(*sizes), PartitionSpec(*spec))
    with pytest.raises(ValueError, match="evenly divide"):
        jax.jit(lambda x: orthogonalize(x, MATRIX), in_shardings=place).lower(normal(*shape))
