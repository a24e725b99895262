"""Rows that travel to experts on other ranks against a program without ranks; KF-059, KF-060, KF-099.

Compiling takes the time here: one program per case serves all of its routings. Whatever a buffer
holds besides rows that have arrived is NaN throughout.
"""

import functools
import logging
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from k3jax.sharding import expert_parallel, expert_rounds
from k3jax.sharding.annotate import region
from k3jax.sharding.expert_parallel import apply_experts, bytes_per_token
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


class Case(NamedTuple):
    """A program."""

    ranks: int
    num_experts: int
    room: float
    transport: str
    keep_rows: bool = False
    active: int = ACTIVE
    tokens: int = TOKENS
    dim: int = DIM

    @property
    def held(self):
        return -(-self.num_experts // self.ranks)


def counted(ids, mask, way):
    """The number of rounds; NaN if one of them has more than its room holds."""
    ids = jnp.where(mask[:, None], ids, expert_parallel.axis_size("expert") * way.held)
    known = expert_rounds.survey(ids, way)

    def body(carry, way=way.further):
        rounds, fits, begin, _ = carry
        trip, begin, more = expert_rounds.plan_round(begin, known, way)
        me = jax.lax.axis_index("expert")
        most = trip.size[:, me].sum() if way.transport == "ragged" else trip.size[:, me].max()
        fits &= most <= (way.room if way.transport == "ragged" else way.arrivals)
        count = (trip.rows < way.room_rows).sum(1)
        fits &= trip.group_sizes.sum() == count.sum()  # none was cut off
        fits &= (count > 0).sum() == trip.size[:, me].sum()
        return rounds + 1, fits, begin, more

    carry = jnp.float32(0), jnp.bool(True), expert_rounds.start(known, way), jnp.bool(True)
    rounds, fits, *_ = jax.lax.while_loop(lambda carry: carry[-1], body, body(carry, way))
    return jnp.where(fits, rounds, jnp.nan)


@functools.cache
def program(case):
    """(function of the rows of all ranks -> output and gradients; one that counts rounds; their mesh).

    Two programs: XLA's CPU runs what does not depend on each other in any order, and waits for ever
    where collectives outside and inside a loop come in another order on another device.
    """
    mesh = make_mesh(MeshConfig(data=1, expert=case.ranks), jax.devices()[: case.ranks])
    room = {"room": case.room, "transport": case.transport}

    def call(z, p, w, ids, mask, du):
        def apply(z, p, w):
            options = {"keep_rows": case.keep_rows, **room}
            return apply_experts(OP, z, p, ids, mask, case.num_experts, (w,), **options)

        u, pull = jax.vjp(apply, z, p, w)
        return u, *pull(du)

    def count(z, p, w, ids, mask, du):
        way = expert_rounds.plan_way(case.tokens, case.active, case.num_experts, **room)
        return counted(ids, mask, way)[None]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "ragged_all_to_all", emulated)
        patch.setattr(expert_rounds, "empty", lambda shape, dtype: jnp.full(shape, np.nan, dtype))
        shapes = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, SPLIT)),
            arrays(case),
        )
        run, rounds = (
            jax.jit(region(f, mesh, SPLIT, SPLIT), keep_unused=True).lower(*shapes).compile()
            for f in (call, count)
        )
    return run, rounds, mesh


def arrays(case, seed=0, skew=0.0):
    """Tokens of all ranks; a skew prefers the first experts."""
    rng = np.random.default_rng(seed)
    tokens, num_experts, dim = case.ranks * case.tokens, case.num_experts, case.dim
    scores = rng.normal(size=(tokens, num_experts)) - skew * np.arange(num_experts)
    held = case.held * case.ranks
    w = rng.normal(size=(held, dim, dim)) * (np.arange(held) < num_experts)[:, None, None]
    ids = np.argsort(-scores, axis=1)[:, : case.active]
    z, du = rng.normal(size=(2, tokens, dim))
    mask = rng.random(tokens) < 0.8
    z[~mask] = np.nan
    p = rng.uniform(size=(tokens, case.active))
    f = np.float32
    return f(z), f(p), f(w), ids.astype(np.int32), mask, f(du)


def compare(args, case):
    """Checks output and gradients; returns the rounds that it took."""
    run, rounds, mesh = program(case)
    placed = [jax.device_put(a, NamedSharding(mesh, SPLIT)) for a in args]
    got, rounds = jax.block_until_ready(run(*placed)), rounds(*placed)
    z, *rest = args
    want = jax.jit(alone)(np.nan_to_num(z), *rest)
    for name, a, b in zip(["u", "z", "p", "w"], got, want, strict=True):
        assert_close({name: a}, {name: np.asarray(b)}, "float32_grad")
    (same,) = set(np.asarray(rounds).tolist())
    assert not np.asarray(got[1])[~args[4]].any()
    return same


def expected_rounds(ids, mask, case):
    """Token by token: a round ends before the arrival that is too many, or has a row too many.

    Further rounds have a fourth of the room.
    """
    chance = 1 - math.comb(case.num_experts - case.held, case.active) / math.comb(
        case.num_experts, case.active
    )
    most = min(case.active, case.held)
    arrivals = min(math.ceil(round(case.room * case.tokens * chance, 9)), case.tokens)
    rows = math.ceil(case.room * case.tokens * case.active / case.ranks)
    rows = max(min(rows, arrivals * most), most)
    further = math.ceil(arrivals / 4)
    room = [(arrivals, rows), (further, max(min(math.ceil(rows / 4), further * most), most))]
    lanes = 1 if case.transport == "ragged" else case.ranks
    rounds = 1
    for rank in range(case.ranks):
        here = ((ids // case.held == rank) & mask[:, None]).sum(1)
        for lane in here.reshape(lanes, -1):
            taken, filled, used = 1, 0, 0
            for count in lane[lane > 0]:
                filled, used = filled + 1, used + count
                arrivals, rows = (n * case.ranks // lanes for n in room[taken > 1])
                if filled > arrivals or used > rows:
                    taken, filled, used = taken + 1, 1, count
            rounds = max(rounds, taken)
    return rounds


def only(args, *, ids=None, mask=None):
    z, p, w, old_ids, old_mask, du = args
    mask = old_mask if mask is None else mask
    z = np.where(mask[:, None], np.nan_to_num(z, nan=0.5), np.nan)
    ids = old_ids if ids is None else np.broadcast_to(np.int32(ids), old_ids.shape)
    return z, p, w, np.ascontiguousarray(ids), mask, du


CASES = {
    "2 ranks, padded": Case(2, 8, 1.25, "padded"),
    "4 ranks, padded": Case(4, 8, 1.0, "padded"),
    "4 ranks, padded, rows kept": Case(4, 8, 1.0, "padded", True),
    "4 ranks, ragged": Case(4, 8, 1.0, "ragged"),
    "8 ranks, ragged, little room": Case(8, 8, 0.3, "ragged"),
    "KF-099: 6 experts over 4": Case(4, 6, 1.25, "ragged"),
    "KF-099: 3 experts over 4": Case(4, 3, 1.25, "padded"),
    "more choices than ranks": Case(2, 12, 1.0, "ragged", active=5),
    "as many choices as ranks, little room": Case(4, 16, 0.4, "ragged", True, active=4),
    "5 choices of 8 experts each, padded": Case(4, 32, 0.7, "padded", active=5),
}


@pytest.mark.parametrize("case", CASES)
def test_kf_059_output_and_gradients_equal_one_rank(case):
    """KF-059: random and adversarial routings, ranks that send or receive nothing.

    Of the bounds of a round, many choices on one rank reach that of rows, and a choice on every rank
    that of arrivals.
    """
    case = CASES[case]
    args = arrays(case)
    tokens, rank = case.ranks * case.tokens, np.arange(case.ranks * case.tokens) // case.tokens
    nth = np.arange(case.active)
    everywhere = nth % case.ranks * case.held + nth // case.ranks
    everywhere = np.where(everywhere < case.num_experts, everywhere, nth)
    mixed = np.where(np.arange(tokens)[:, None] % 3 == 0, nth, everywhere)
    routings = {
        "random": args,
        "skewed": arrays(case, seed=1, skew=1.0),
        "all to the last rank": only(args, ids=case.num_experts - case.active + nth),
        "all to the first experts": only(args, ids=nth[::-1]),
        "each to all ranks": only(args, ids=everywhere, mask=np.ones(tokens, bool)),
        "many to one rank among some to all": only(args, ids=mixed),
        "many to one rank behind all to all": only(args, ids=np.sort(mixed, axis=0)),
        "rank 1 has no tokens": only(args, mask=rank != 1),
        "only rank 1 has tokens": only(args, mask=rank == 1),
        "no tokens": only(args, mask=rank < 0),
        "one row": only(args, mask=np.arange(tokens) == tokens - 1),
    }
    for name, routing in routings.items():
        rounds = compare(routing, case)
        assert rounds == expected_rounds(routing[3], routing[4], case), name
        if name == "no tokens":
            assert rounds == 1


@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_kf_060_four_times_the_room_takes_ten_rounds(transport):
    """KF-060: ep=4, room for what a rank sends, all to one rank: no row is lost.

    The first round takes 12 of the 48 tokens, with 6 rows per rank; further ones, with 2, take 4.
    """
    case = Case(4, 8, 1.0, transport)
    args = only(arrays(case), ids=(6, 7), mask=np.ones(4 * TOKENS, bool))
    assert compare(args, case) == 10


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**31),
    st.floats(0, 3),
    st.sampled_from(["4 ranks, padded", "4 ranks, ragged", "more choices than ranks"]),
)
def test_random_routings(seed, skew, case):
    args = arrays(CASES[case], seed, skew)
    assert compare(args, CASES[case]) == expected_rounds(args[3], args[4], CASES[case])


@pytest.mark.parametrize("held", [1, 3])
def test_experts_that_the_ranks_cannot_hold(held):
    mesh = make_mesh(MeshConfig(data=1, expert=4), jax.devices()[:4])

    def call(z, p, ids):
        return apply_experts(OP, z, p, ids, None, 8, (jnp.zeros((held, DIM, DIM)),))

    shapes = ((8, DIM), float), ((8, ACTIVE), float), ((8, ACTIVE), int)
    args = [jnp.zeros(*shape, device=NamedSharding(mesh, SPLIT)) for shape in shapes]
    with pytest.raises(ValueError, match=f"4 ranks with {held} experts each do not hold 8 experts"):
        jax.eval_shape(region(call, mesh, SPLIT, SPLIT), *args)


def sent_bytes(hlo, case):
    """Bytes that a rank sends per token in the first round: (forward, both), of a compiled program."""
    entry = hlo[hlo.index("\nENTRY ") :]
    forward = both = 0
    for line in entry.splitlines():
        found = re.search(r" (all-to-all|all-gather|reduce-scatter)\(", line)
        if not found or f"s32[{case.ranks},{3 * case.ranks + 1}]" in line:  # sizes of the round
            continue
        results = re.findall(r"[fs]32\[([\d,]+)\]", line[: found.start()])
        numbers = sum(np.prod([int(n) for n in result.split(",")]) for result in results)
        # All have a part of each rank, reduce-scatter in its operand.
        numbers *= case.ranks if found[1] == "reduce-scatter" else 1
        sent = 4 * numbers / case.tokens * (case.ranks - 1) / case.ranks
        both += sent
        forward += sent * ("transpose" not in line)
    return forward, both


def test_bytes_are_those_of_the_latents():
    """What is compiled sends what `bytes_per_token` says; half of an exchange in twice the width."""
    case = Case(4, 8, 1.0, "padded", tokens=28)  # 13 of 28 tokens choose some of 2 experts of 8
    kept = case._replace(keep_rows=True)
    want = bytes_per_token(ACTIVE, DIM, 4, 8, itemsize=4, keep_rows=True)
    np.testing.assert_allclose(sent_bytes(program(kept)[0].as_text(), kept), want, rtol=1e-12)
    sent = {}
    for dim in (DIM, 2 * DIM):
        wide = case._replace(dim=dim)
        sent[dim] = np.array(sent_bytes(program(wide)[0].as_text(), wide))
        want = bytes_per_token(ACTIVE, dim, 4, 8, itemsize=4)
        np.testing.assert_allclose(sent[dim], want, rtol=1e-12)
    choices = np.array(bytes_per_token(ACTIVE, 0, 4, 8))
    np.testing.assert_allclose(sent[DIM] - choices, (sent[2 * DIM] - choices) / 2, rtol=1e-12)


def test_a_token_travels_once_to_a_rank():
    """Kimi K3: with 8, 16, 32, 64 ranks to 7.07, 10.35, 12.83, 14.36 instead of 16 (spec 3, 1)."""
    for ranks, copies in {8: 7.07, 16: 10.35, 32: 12.83, 64: 14.36}.items():
        latent, wide, choices = (
            np.array(bytes_per_token(16, dim, ranks, 896)) for dim in (3584, 7168, 0)
        )
        np.testing.assert_allclose((latent - choices) / (wide - choices), 0.5, rtol=1e-12)
        away = copies * (ranks - 1) / ranks * 3584 * 2
        np.testing.assert_allclose(latent - choices, (2 * away, 5 * away), rtol=1e-3)
        assert (choices < 0.05 * latent).all()
    assert bytes_per_token(16, 3584, 1, 896) == (0, 0)
    # 4 experts over 3 ranks, 2 each: one rank has none, so that each token goes to 1 + 4/6 of two.
    forward, _ = bytes_per_token(2, 1, 3, 4, itemsize=3)
    np.testing.assert_allclose(forward, 2 * 3 * (5 / 6 + 5 / 6) * 2 / 3 + 2 * 2 * 2 * 4)


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
