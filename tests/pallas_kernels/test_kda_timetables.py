"""The timetables of the TPU kernels: nothing is read before it is written or after it is written anew.

The kernels' own pieces run on references that only take notes. Their turns are put into the order
of a step, three steps follow each other, and every read must find what its own block wrote.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from k3jax.pallas_kernels.kda import tpu_backward, tpu_calls, tpu_forward
from k3jax.pallas_kernels.kda.tpu_step import CHUNK, Plan

STEPS = 3
# Carried from block to block, or read on purpose before it is written anew.
CARRIED = ("memory", "d_memory", "late_live")


class Noted:
    """A reference that holds zeros and notes what is read and written: (kind, name, lead, rows)."""

    def __init__(self, name, shape, dtype, notes):
        self.name, self.dtype, self.zeros, self.notes = name, dtype, jnp.zeros(shape, dtype), notes

    def _note(self, kind, index):
        index = index if isinstance(index, tuple) else (index,)
        rows = index[1] if len(index) > 1 else slice(None)
        if not isinstance(rows, slice):
            rows = slice(rows, rows + 1)
        rows = range(*rows.indices(self.zeros.shape[1] if self.zeros.ndim > 1 else 1))
        self.notes.append((kind, self.name, index[0], rows))

    def __getitem__(self, index):
        self._note("read", index)
        return self.zeros[index]

    def __setitem__(self, index, value):
        self._note("write", index)


def references(plan, backward):
    """The kernel's references by name, and which of them are scratch."""
    op, f32, H, C = jnp.bfloat16, jnp.float32, plan.heads, plan.chunks
    tokens, square = (plan.tokens, H * 128), (C, H, CHUNK, CHUNK)
    memory, states = (1, H, 128, 128), (C, H, 128, 128)
    inputs = dict.fromkeys(("q", "k", "v", "g"), (tokens, op))
    inputs |= {"rows": ((1, C, H + 2, CHUNK), f32), "gate": ((2, H * 128), f32)}
    if backward:
        scratch = tpu_calls._backward_scratch(plan)
        outputs = dict.fromkeys(("d_o", "dq", "dk", "dv", "dg"), (tokens, op))
        outputs |= {"reads": (square, op), "inverse": (square, op), "states": (states, op)}
        outputs |= {"d_beta": ((1, C, H, CHUNK), f32), "d_gate": ((1, 2, H * 128), f32)}
        outputs |= {"d_final": (memory, f32), "d_state": (memory, f32), "last": ((4,), jnp.int32)}
    else:
        scratch = tpu_calls._forward_scratch(plan)
        outputs = {"o": (tokens, op), "states": (states, op), "first": ((4,), jnp.int32)}
        outputs |= {"saved_reads": (square, op), "saved_inverse": (square, op)}
        outputs |= {"state": (memory, f32), "final": (memory, f32)}
    return inputs | outputs | scratch, scratch.keys()


def pieces(plan, backward, monkeypatch):
    """(start, pace, name, notes of every turn) of all pieces of a block, nothing wrapped."""
    module, notes, found = (tpu_backward if backward else tpu_forward), [], []
    kernel = module.backward_kernel if backward else module.forward_kernel
    described, scratch = references(plan, backward)

    def emit(work):
        for start, pace, piece in work:
            turns, going = [], True
            while going:
                notes.clear()
                going = next(piece, "ended") != "ended"
                turns.append([note for note in notes if note[1] in scratch])
            found.append((start, pace, piece.__name__, turns))

    grid = SimpleNamespace(
        program_id=lambda _: jnp.int32(1),
        num_programs=lambda _: jnp.int32(2),
        when=lambda _: lambda _: None,
    )
    monkeypatch.setattr(module, "emit", emit)
    monkeypatch.setattr(module, "pl", grid)
    if not backward:
        monkeypatch.setattr(module, "PIPELINED", plan.chunks + 1)

    def run():
        refs = [Noted(name, *x, notes) for name, x in described.items()]
        kernel(Plan(**vars(plan) | {"names": tuple(described)}), *refs)
        return 0

    jax.eval_shape(run)
    return found


@pytest.mark.parametrize(
    ("backward", "heads", "chunks"),
    [(False, 1, 4), (False, 3, 5), (False, 8, 4), (False, 4, 2), (True, 3, 5), (True, 4, 8)],
)
def test_every_read_finds_what_its_own_block_wrote(backward, heads, chunks, monkeypatch):
    plan = Plan(
        chunks=chunks, heads=heads, K=128, V=128, dtype="bfloat16", gate="bounded", g_min=-5.0,
        q_scale=0.1, erase=True, masked=True, snapshots=False, save=True,
    )  # fmt: skip
    pipelined = not backward and chunks >= tpu_forward.PIPELINED
    order = []
    for n, (start, pace, name, turns) in enumerate(pieces(plan, backward, monkeypatch)):
        wrapped = pipelined and start >= chunks
        time = start - chunks if wrapped else start
        for turn in turns:
            order.append((time, n, wrapped or name == "_recur", name, turn))
            time += pace
    order.sort(key=lambda x: x[:2])
    writers, reads = {}, 0
    for step in range(STEPS):
        for _, _, late, name, turn in order:
            block = step - late
            for kind, ref, lead, rows in turn:
                for row in rows:
                    if kind == "write":
                        writers[ref, lead, row] = (block, name)
                    elif block >= 0 and ref not in CARRIED and (ref, name) != ("live", "numbers"):
                        reads += 1
                        found = writers.get((ref, lead, row))
                        assert found, (name, ref, lead, row, "is read before it is written")
                        assert found[0] == block, (name, ref, lead, row, found, block)
                        if (name, ref) == ("_merge", "L"):
                            merged = "_merge_tiles" if row < CHUNK // 2 else "_scores"
                            assert found[1] == merged
    assert reads > 1000
