"""The backward TPU kernel of KDA; tpu_step.py has the operands, README.md the algorithm."""

from types import SimpleNamespace

import jax.numpy as jnp
from jax.experimental import pallas as pl

from k3jax.pallas_kernels.kda.gates import LOG2E
from k3jax.pallas_kernels.kda.tpu_step import (
    CENTRE,
    CHUNK,
    TILE,
    TILES,
    Piece,
    Plan,
    Step,
    Timed,
    between,
    dot,
    earlier,
    emit,
    fine_sums,
    iota,
    tile,
)

# When the work on a chunk begins, in chunks after its own time; its pace; and the time from the
# first head to one past the last.
TIMES = {
    "numbers": (-0.2, 0.0625, 0.0),
    "decays": (0.2, 0.0375, 1.08),
    "keys": (0.0, 0.0375, 1.0),
    "queries": (0.2, 0.1125, 1.28),
    "totals": (1.05, 0.04375, 1.0),
    "rows": (1.25, 0.01, 1.0),
    "columns": (1.4, 0.02, 1.0),
    "errors": (1.75, 0.075, 1.0),
    "recur": (2.45, 0.2, 0.0),
    "far": (3.5, 0.01875, 1.0),
    "near": (3.8, 0.03125, 1.0),
    "tiles": (4.05, 0.0049, 1.0),
    "beta": (4.9, 0.08, 1.0),
    "gate": (4.3, 0.15, 1.0),
}


def backward_kernel(plan: Plan, *references) -> None:
    """A block, last chunk first: its operands, the gradient on its way through the memory, the rest."""
    refs = SimpleNamespace(**dict(zip(plan.names, references, strict=True)))
    step = _BackwardStep(plan, refs)
    block = pl.num_programs(1) - 1 - pl.program_id(1)

    @pl.when(refs.last[block] > 0)
    def _():
        refs.d_memory[...] = refs.d_final[0]

    work: list[Timed] = []

    def add(name: str, c: int, h: int, piece: Piece) -> None:
        start, pace, spread = TIMES[name]
        work.append(Timed(start + (plan.chunks - 1 - c) + h / plan.heads * spread, pace, piece))

    for c in range(plan.chunks):
        add("numbers", c, 0, step.numbers(c))
    for a, c, h in plan.chains:
        for name, make in (
            ("decays", step.decays),
            ("keys", step.keys_to_unit),
            ("queries", step.queries_to_unit),
            ("totals", step.totals),
            ("errors", step.errors),
            ("recur", step.recur),
            ("far", step.through_memory),
            ("near", step.through_scores),
            ("beta", step.beta_gradient),
            ("gate", step.gate),
        ):
            add(name, c, h, make(a, c, h))
        for I in range(TILES):
            add("rows", c, h, step.rows(a, c, h, I))
            add("columns", c, h, step.columns(a, c, h, I))
            add("tiles", c, h, step.through_tile(a, c, h, I))
    emit(work)
    refs.d_state[0] = refs.d_memory[...]
    for h in range(plan.heads):
        at = slice(h * plan.K, (h + 1) * plan.K)
        refs.d_gate[0, :, at] = step.d_gate.get(h, jnp.zeros((2, plan.K), jnp.float32))


class _BackwardStep(Step):
    def __init__(self, plan: Plan, refs: SimpleNamespace):
        super().__init__(plan, refs)
        i, j = iota((CHUNK, 2 * CHUNK), 0), iota((CHUNK, 2 * CHUNK), 1) % CHUNK
        self.from_row = jnp.where(i <= j, 1.0, 0.0).astype(self.op)  # to the end of the chunk
        self.before_row = jnp.where(i > j, 1.0, 0.0).astype(self.op)
        self.ones = jnp.ones((TILE, plan.K), self.op)
        self.d_gate = {}  # of a head
        self.n_rows = (2 if plan.erase else 1) * CHUNK  # of q, then of k if erasing

    def errors(self, a, c, h) -> Piece:
        """refs.errors = what was written for each key: (I + L)^-1 (v - k+ S), or v without erasing."""
        refs, op = self.refs, self.op
        v = self.live(refs.v[self.values(c, h)].astype(jnp.float32), c)
        if not self.plan.erase:
            refs.errors[a] = v.astype(op)
            yield
            return
        read = dot(refs.far_rows[a, CHUNK:], refs.states[c, h].astype(op), "nt")
        yield
        refs.errors[a] = dot(refs.inverse[c, h], (v - read).astype(op)).astype(op)
        yield

    def recur(self, a, c, h) -> Piece:
        """The sequential part: what the loss wants of the memory that leaves a chunk and enters it."""
        plan, refs, op = self.plan, self.refs, self.op
        leaving = refs.d_memory[h].astype(op)
        refs.d_leaving[a] = leaving
        d_o = self.live(refs.d_o[self.values(c, h)].astype(jnp.float32), c).astype(op)
        refs.d_rows_v[a, :CHUNK] = d_o
        yield
        d_errors = dot(refs.reads[c, h], d_o, "tn")
        d_errors = d_errors + dot(refs.far_columns[a], leaving, "nt")
        yield
        if plan.erase:
            d_errors = dot(refs.inverse[c, h], d_errors.astype(op), "tn")
            yield
            refs.d_rows_v[a, CHUNK:] = (-d_errors).astype(op)
        rows = slice(0, self.n_rows)
        wanted = dot(refs.d_rows_v[a, rows], refs.far_rows[a, rows], "tn")
        refs.dv[self.values(c, h)] = self.live(d_errors, c).astype(refs.dv.dtype)
        yield
        entering = refs.d_memory[h] * refs.through[a] + wanted
        refs.d_memory[h] = entering + refs.d_states[c, h] if plan.snapshots else entering
        yield

    # Gradients of a chain's inputs, given those of its rows' values and of the leaving memory.

    def through_memory(self, a, c, h) -> Piece:
        """Through values and memory: gradients of the scores, and of rows and columns at a distance."""
        plan, refs, op = self.plan, self.refs, self.op
        rows = slice(0, self.n_rows)
        S, leaving, errors = refs.states[c, h].astype(op), refs.d_leaving[a], refs.errors[a]
        d_scores = dot(refs.d_rows_v[a, rows], errors, "nt")
        yield
        refs.d_far[a, rows] = dot(refs.d_rows_v[a, rows], S)
        yield
        refs.d_columns[a] = dot(errors, leaving)
        yield
        # A token's own pair does not involve g: kept apart, it cannot leave a rounding error there.
        own = jnp.where(self.i == self.j, d_scores[:CHUNK], 0.0)
        refs.own[a] = jnp.broadcast_to(jnp.sum(own, 1, keepdims=True), (CHUNK, plan.K))
        yield
        for n in range(self.n_rows // CHUNK):
            x = self.near(d_scores[n * CHUNK : (n + 1) * CHUNK], c, strictly=True).astype(op)
            for I in range(TILES):
                at = TILE * (2 * I + n)
                refs.d_scores[a, at : at + TILE] = x[tile(I)]
            yield
        passing = jnp.sum(S.astype(jnp.float32) * leaving.astype(jnp.float32), 0, keepdims=True)
        refs.passing[a] = passing * refs.through[a]
        yield

    def through_scores(self, a, c, h) -> Piece:
        """Through the scores: gradients of rows and columns near each other."""
        refs = self.refs
        count = (self.n_rows // CHUNK) * TILE
        for I in range(TILES):
            rows = slice(2 * TILE * I, 2 * TILE * I + count)
            d_tile = refs.d_scores[a, rows][:, : TILE * (I + 1)]
            refs.d_near[a, rows] = dot(d_tile, self.columns_for(a, I))
            yield
            x = dot(d_tile, refs.near_rows[a, rows], "tn")
            if I:
                refs.d_between[a, earlier(I)] = x[: TILE * I]
            refs.d_near_columns[a, tile(I)] = x[TILE * I :]
            yield

    def through_tile(self, a, c, h, J: int) -> Piece:
        """Of one tile, gradients of q, k and the sums of g, and what is summed to that of beta."""
        plan, refs, op = self.plan, self.refs, self.op
        t, k_rows = tile(J), slice(CHUNK + TILE * J, CHUNK + TILE * (J + 1))
        q_near = slice(2 * TILE * J, 2 * TILE * J + TILE)
        k_near = slice(q_near.stop, q_near.stop + TILE)
        E = jnp.exp2(refs.sums[a, t])
        inverse = jnp.exp2(-refs.sums[a, t])
        yield
        far = self.before(a, J)
        far = far * refs.enters[c, t, : plan.K] if plan.masked else far
        d_q = far * refs.d_far[a, t]
        yield
        d_q = d_q + refs.d_near[a, q_near]
        yield
        # What a pair adds to its row it takes from its column, and the sum over tokens cancels it:
        # to the last bit only if both are multiplied as they were rounded for the matmuls.
        log = refs.near_rows[a, q_near].astype(jnp.float32) * d_q
        E = E * CENTRE
        yield
        d_q, d_k = d_q * E, 0.0
        yield
        if plan.erase:
            d_k = far * refs.d_far[a, k_rows]
            yield
            d_k = d_k + refs.d_near[a, k_near]
            yield
            log = log + refs.near_rows[a, k_near].astype(jnp.float32) * d_k
            d_k = d_k * E
            yield
        inverse = inverse * (1 / CENTRE)
        column = refs.near_columns[a, t].astype(jnp.float32)
        yield
        near = refs.d_near_columns[a, t]
        log = log - column * near
        yield
        later, far = self.further(a, J)
        for I, decay in later.items():
            x = refs.d_between[a, between(I, J)]
            near = near + decay * x
            yield
            log = log - refs.between_columns[a, between(I, J)].astype(jnp.float32) * x
            yield
        refs.d_sums[a, t] = log
        far = far * refs.d_columns[a, t]
        far = far * refs.leaves[c, t, : plan.K] if plan.masked else far
        yield
        # The row of a column that reaches the end lies outside the chunk: nothing cancels it.
        refs.d_leaves[a, t] = column * far
        d_column = (near + far) * inverse
        yield
        q, k, beta, own = refs.q_unit[a, t], refs.k_unit[a, t], refs.beta[a, t], refs.own[a, t]
        d_column = d_column + own * q
        yield
        refs.written[a, t] = (d_column * k).astype(op)
        yield
        d_q = d_q + (own * beta) * k
        yield
        d_k = d_k + d_column * beta
        yield
        gradients = {"q": (q, d_q), "k": (k, d_k)}
        if plan.q_scale is not None:
            along = {x: jnp.sum(unit * d, 1, keepdims=True) for x, (unit, d) in gradients.items()}
            yield
            along["q"] = along["q"] * plan.q_scale**-2
            gradients = {x: (unit, d - unit * along[x]) for x, (unit, d) in gradients.items()}
            yield
            norms = {"q": refs.q_norm, "k": refs.k_norm}
            gradients = {x: (unit, d * norms[x][a, t]) for x, (unit, d) in gradients.items()}
            yield
        where = self.keys(c, h)
        token = slice(where[0].start + t.start, where[0].start + t.stop)
        for out, (_, d) in zip((refs.dq, refs.dk), gradients.values(), strict=True):
            out[token, where[1]] = self.live(d, c, t).astype(out.dtype)
            yield

    def beta_gradient(self, a, c, h) -> Piece:
        """The sum over channels by a matmul, which leaves tokens along the lanes."""
        d_beta = dot(self.ones, self.refs.written[a], "nt")
        yield
        self.refs.d_beta[0, c, h : h + 1] = d_beta[:1]
        yield

    def gate(self, a, c, h) -> Piece:
        """The gradient of g or z: a row decays with the tokens up to its own, a column with those after."""
        plan, refs, where = self.plan, self.refs, self.keys(c, h)
        d_g = fine_sums(plan, self.from_row, refs.d_sums[a]) + refs.passing[a]
        yield
        d_g = d_g + fine_sums(plan, self.before_row, refs.d_leaves[a])
        yield
        if plan.gate == "bounded":
            # g = c r with r = 1 / (1 + 2^x), so dg/dx = -ln(2) c r^2 2^x: no difference to cancel.
            z = self.live(refs.g[where].astype(jnp.float32), c)
            slope = refs.gate[0:1, where[1]]
            grown = self.grown(z, where[1])
            yield
            g = refs.decay[a]
            d_exponent = d_g * (g * grown * g) * (-1 / (plan.g_min * LOG2E**3))
            yield
            self.d_gate[h] = self.d_gate.get(h, 0.0) + jnp.concatenate(
                [jnp.sum(x, 0, keepdims=True) for x in (d_exponent * z, d_exponent)], 0
            )
            yield
            d_g = d_exponent * slope
        refs.dg[where] = self.live(d_g, c).astype(refs.dg.dtype)
        yield
