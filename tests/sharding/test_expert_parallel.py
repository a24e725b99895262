"""Rows that travel to experts on other ranks against a program without ranks; KF-059, KF-060, KF-099.

Compiling takes the time here: one program per case serves all of its routings. Whatever a buffer
holds besides rows that have arrived is NaN throughout.
"""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from k3jax.sharding import expert_parallel
from k3jax.sharding.annotate import region
from k3jax.sharding.expert_parallel import Way, apply_experts, bytes_per_token, plan_dispatch
from k3jax.sharding.mesh import MeshConfig, make_mesh
from k3jax.testing import assert_close

pytestmark = pytest.mark.devices
TOKENS, ACTIVE, DIM = 12, 2, 6  # of a rank
SPLIT = PartitionSpec("expert")


class Tanh:
    """Experts with one matrix: y = p tanh(w_e x)."""

    def __call__(self, rows, p, group_sizes, matrices):
        return self.forward(rows, p, group_sizes, matrices)[0]

    def forward(self, rows, p, group_sizes, matrices):
        (w,) = matrices
        t = jnp.einsum("mk,mkn->mn", rows, self._of_rows(w, group_sizes, rows.shape[0]))
        return p[:, None] * jnp.tanh(t), t

    def backward(self, saved, dy, rows, p, group_sizes, matrices):
        (w,) = matrices
        a = jnp.tanh(saved)
        dt = dy * p[:, None] * (1 - a**2)

        def of_rows(w):
            return self._of_rows(w, group_sizes, rows.shape[0])

        dw = jax.vjp(of_rows, w)[1](rows[:, :, None] * dt[:, None, :])[0]
        return jnp.einsum("mn,mkn->mk", dt, of_rows(w)), (dy * a).sum(-1), (dw,)

    def _of_rows(self, w, group_sizes, rows):
        """By a product with every expert, so that NaN in a row of no expert would spoil all of dw."""
        ends = jnp.cumsum(group_sizes)[None]
        row = jnp.arange(rows)[:, None]
        chosen = (row < ends) & (row >= ends - group_sizes)
        return jnp.einsum("me,ekn->mkn", chosen.astype(w.dtype), w)


OP = Tanh()


def alone(z, p, w, ids, mask, du):
    """Without ranks, rows or an order: output and gradients."""

    def apply(z, p, w):
        every = jnp.tanh(jnp.einsum("sk,ekn->sen", z, w))
        chosen = jnp.take_along_axis(every, ids[..., None], 1)
        return jnp.where(mask[:, None], (p[..., None] * chosen).sum(1), 0)

    u, pull = jax.vjp(apply, z, p, w)
    return u, *pull(du)


def emulated(x, out, x_at, size, out_at, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` as its documentation reads, by gathering everything."""
    xs, x_ats, sizes, out_ats = (jax.lax.all_gather(a, axis_name) for a in (x, x_at, size, out_at))
    me = jax.lax.axis_index(axis_name)
    for source in range(xs.shape[0]):
        nth = jnp.arange(out.shape[0]) - out_ats[source, me]
        inside = (nth >= 0) & (nth < received[source])
        inside &= received[source] == sizes[source, me]  # else nothing arrives, and the test fails
        rows = xs[source].at[x_ats[source, me] + nth].get(mode="fill", fill_value=jnp.nan)
        out = jnp.where(inside.reshape(-1, *(1,) * (x.ndim - 1)), rows, out)
    return out


@functools.cache
def program(ranks, num_experts, room, transport, keep_rows=False, dim=DIM):
    """(function of the rows of all ranks -> output, gradients and rounds; its mesh)."""
    mesh = make_mesh(MeshConfig(data=1, expert=ranks), jax.devices()[:ranks])

    def call(z, p, w, ids, mask, du):
        plan = plan_dispatch(ids, mask, num_experts)

        def apply(z, p, w):
            options = {"keep_rows": keep_rows, "room": room, "transport": transport}
            return apply_experts(OP, z, p, plan, (w,), **options)

        u, pull = jax.vjp(apply, z, p, w)
        way = Way(transport, int(np.ceil(room * ids.size / ranks)))
        counts = expert_parallel.all_counts(plan.group_sizes, w.shape[0])
        return u, *pull(du), expert_parallel.num_rounds(counts, way)[None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_all_to_all", emulated)
        patch.setattr(expert_parallel, "empty", lambda shape, dtype: jnp.full(shape, np.nan, dtype))
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, SPLIT)),
            arrays(ranks, num_experts, dim=dim),
        )
        lowered = jax.jit(region(call, mesh, SPLIT, SPLIT)).lower(*shapes)
    return lowered.compile(), mesh


def arrays(ranks, num_experts, seed=0, skew=0.0, dim=DIM):
    """Tokens of all ranks; a skew prefers the first experts."""
    rng = np.random.default_rng(seed)
    tokens = ranks * TOKENS
    scores = rng.normal(size=(tokens, num_experts)) - skew * np.arange(num_experts)
    held = -(-num_experts // ranks) * ranks
    w = rng.normal(size=(held, dim, dim)) * (np.arange(held) < num_experts)[:, None, None]
    ids = np.argsort(-scores, axis=1)[:, :ACTIVE]
    z, du = rng.normal(size=(2, tokens, dim))
    mask = rng.random(tokens) < 0.8
    z[~mask] = np.nan
    p = rng.uniform(size=(tokens, ACTIVE))
    f = np.float32
    return f(z), f(p), f(w), ids.astype(np.int32), mask, f(du)


def compare(args, ranks, num_experts, room, transport, keep_rows=False):
    """Checks output and gradients; returns the rounds that it took."""
    run, mesh = program(ranks, num_experts, room, transport, keep_rows)
    *got, rounds = run(*(jax.device_put(a, NamedSharding(mesh, SPLIT)) for a in args))
    z, *rest = args
    want = jax.jit(alone)(np.nan_to_num(z), *rest)
    for name, a, b in zip(["u", "z", "p", "w"], got, want, strict=True):
        assert_close({name: a}, {name: np.asarray(b)}, "float32_grad")
    (same,) = set(np.asarray(rounds).tolist())
    assert not np.asarray(got[1])[~args[4]].any()
    return same


def expected_rounds(ids, mask, ranks, num_experts, room, transport, keep_rows=False):
    held, each = -(-num_experts // ranks), int(np.ceil(room * TOKENS * ACTIVE / ranks))
    source = np.arange(ids.shape[0])[:, None] // TOKENS * np.ones_like(ids)
    pairs = np.zeros((ranks, ranks), int)
    np.add.at(pairs, (source[mask], ids[mask] // held), 1)
    if transport == "ragged":
        return -(-pairs.sum(0).max() // (each * ranks))
    return -(-pairs.max() // each)


def only(args, *, ids=None, mask=None):
    z, p, w, old_ids, old_mask, du = args
    mask = old_mask if mask is None else mask
    z = np.where(mask[:, None], np.nan_to_num(z, nan=0.5), np.nan)
    ids = old_ids if ids is None else np.broadcast_to(np.int32(ids), old_ids.shape)
    return z, p, w, np.ascontiguousarray(ids), mask, du


CASES = {
    "2 ranks, padded": (2, 8, 1.25, "padded"),
    "4 ranks, padded": (4, 8, 1.0, "padded"),
    "4 ranks, padded, rows kept": (4, 8, 1.0, "padded", True),
    "4 ranks, ragged": (4, 8, 1.0, "ragged"),
    "8 ranks, ragged, little room": (8, 8, 0.3, "ragged"),
    "KF-099: 6 experts over 4": (4, 6, 1.25, "ragged"),
    "KF-099: 3 experts over 4": (4, 3, 1.25, "padded"),
}


@pytest.mark.parametrize("case", CASES)
def test_kf_059_output_and_gradients_equal_one_rank(case):
    """KF-059: random and adversarial routings, ranks that send or receive nothing."""
    ranks, num_experts, *_ = CASES[case]
    args = arrays(ranks, num_experts)
    rank = np.arange(ranks * TOKENS) // TOKENS
    routings = {
        "random": args,
        "skewed": arrays(ranks, num_experts, seed=1, skew=1.0),
        "all to the last rank": only(args, ids=(num_experts - 2, num_experts - 1)),
        "all to the first experts": only(args, ids=(1, 0)),
        "rank 1 has no tokens": only(args, mask=rank != 1),
        "only rank 1 has tokens": only(args, mask=rank == 1),
        "no tokens": only(args, mask=rank < 0),
        "one row": only(args, mask=np.arange(ranks * TOKENS) == ranks * TOKENS - 1),
    }
    for name, routing in routings.items():
        rounds = compare(routing, *CASES[case])
        want = expected_rounds(routing[3], routing[4], *CASES[case])
        assert rounds == want, name
        if name == "no tokens":
            assert rounds == 0


@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_kf_060_four_times_the_room_takes_four_rounds(transport):
    """KF-060: ep=4, room for what a rank sends, all to one rank: no row is lost."""
    args = only(arrays(4, 8), ids=(6, 7), mask=np.ones(4 * TOKENS, bool))
    assert compare(args, 4, 8, 1.0, transport) == 4


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**31), st.floats(0, 3), st.sampled_from(["4 ranks, padded", "4 ranks, ragged"])
)
def test_random_routings(seed, skew, case):
    args = arrays(4, 8, seed, skew)
    assert compare(args, *CASES[case]) == expected_rounds(args[3], args[4], *CASES[case])


def test_experts_that_the_ranks_cannot_hold():
    with pytest.raises(ValueError, match="4 ranks with 2 experts each do not hold 9 experts"):
        jax.eval_shape(
            region(
                lambda n: expert_parallel.all_counts(n, 2),
                make_mesh(MeshConfig(data=1, expert=4), jax.devices()[:4]),
                PartitionSpec(),
                SPLIT,
            ),
            jnp.zeros(9, int),
        )


def sent_bytes(hlo):
    """Bytes that a rank sends per token in the first round: (forward, both), of a compiled program."""
    entry = hlo[hlo.index("\nENTRY ") :]
    found = [line for line in entry.splitlines() if " all-to-all(" in line]
    forward = both = 0
    for line in found:
        parts = re.findall(r"f32\[([\d,]+)\]", line.split(" all-to-all(")[0])  # one per rank
        sent = sum(4 * np.prod([int(n) for n in part.split(",")]) for part in parts[1:]) / TOKENS
        both += sent
        forward += sent * ("transpose" not in line)
    return forward, both


def test_bytes_are_those_of_the_latents():
    """What is compiled sends what `bytes_per_token` says; half of an exchange in twice the width."""
    sent = {}
    run, _ = program(4, 8, 1.0, "padded", True)
    want = bytes_per_token(ACTIVE, DIM, 4, itemsize=4, keep_rows=True)
    assert sent_bytes(run.as_text()) == want
    for dim in (DIM, 2 * DIM):
        run, _ = program(4, 8, 1.0, "padded", dim=dim)
        sent[dim] = np.array(sent_bytes(run.as_text()))
        assert tuple(sent[dim]) == bytes_per_token(ACTIVE, dim, 4, itemsize=4)
    weights = np.array(bytes_per_token(ACTIVE, 0, 4))
    np.testing.assert_array_equal(sent[DIM] - weights, (sent[2 * DIM] - weights) / 2)

    latent, wide = (np.array(bytes_per_token(16, dim, 8)) for dim in (3584, 7168))
    np.testing.assert_allclose(latent / wide, 0.5, rtol=1e-3)
    assert bytes_per_token(16, 3584, 1) == (0, 0)


def test_the_transport_follows_the_devices_of_the_mesh(caplog):
    caplog.set_level(logging.INFO, "k3jax")
    expert_parallel._log_transport.cache_clear()
    assert expert_parallel.choose_transport() == "padded"
    kind = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        assert [expert_parallel.choose_transport() for _ in range(2)] == ["ragged"] * 2
    assert [r.message.split(" runs as ")[1] for r in caplog.records] == [
        "padded (XLA has no ragged all-to-all for cpu)",
        "ragged (this is a tpu)",
    ]
