"""The scheduled HLO of a compiled program: which ops run, how often, and the bytes they move."""

import math
import re
from typing import NamedTuple

SIZES = {  # bytes of an element
    **dict.fromkeys(("s4", "u4"), 0.5),
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
}
FREE = {  # no code
    *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"),
    *("partition-id", "replica-id"),
}


class Instruction(NamedTuple):
    name: str
    shape: str
    op: str
    raw: str  # between the parentheses
    args: list[str]  # names of operands
    attrs: str  # behind the parentheses

    @property
    def is_kernel(self) -> bool:
        return "tpu_custom_call" in self.attrs


Computation = dict[str, Instruction]


class Buffer(NamedTuple):
    dims: list[int]
    size: float  # bytes, padded to tiles
    in_hbm: bool


def buffers(shape: str) -> list[Buffer]:
    """The arrays of an HLO shape."""
    found = []
    for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape):
        if dtype in SIZES:
            dims = [int(d) for d in dims.split(",") if d]
            tile = re.search(r"T\(([\d,]+)\)", layout)
            minor_first = re.findall(r"\d+", layout.split(":")[0])
            padded = list(dims)
            tiles = reversed(tile[1].split(",") if tile and dims else [])
            for d, t in zip(minor_first, tiles, strict=False):
                padded[int(d)] = -(-padded[int(d)] // int(t)) * int(t)
            in_hbm = not re.search(r"S\([1-9]", layout)
            found.append(Buffer(dims, math.prod(padded) * SIZES[dtype], in_hbm))
    return found


def _hbm(shape: str) -> float:
    return sum(b.size for b in buffers(shape) if b.in_hbm)


class Program:
    """An HLO module in its printed form, by computations."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.unknown_trip_counts = 0
        current: Computation = {}
        self.entry = current
        for line in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
            body = re.match(
                r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)", line
            )
            if head:
                current = self.computations.setdefault(head[2], {})
                if head[1]:
                    self.entry = current
            elif body:
                name, shape, op, raw, attrs = body.groups()
                args = re.findall(r"%([\w.\-]+)", raw)
                current[name] = Instruction(name, shape, op, raw, args, attrs)
        # (instruction, its computation, times run); of a conditional every branch
        self.schedule = self._schedule(self.entry, 1)

    def _called(self, ins: Instruction, key: str) -> Computation:
        found = re.search(key + r"=%?([\w.\-]+)", ins.attrs)
        return self.computations.get(found[1], {}) if found else {}

    def _schedule(
        self, computation: Computation, times: int
    ) -> list[tuple[Instruction, Computation, int]]:
        found = []
        for ins in computation.values():
            if ins.op == "while":
                trips = re.findall(r"known_trip_count\D*(\d+)", ins.attrs) or [
                    c.raw for c in self._called(ins, "condition").values() if c.op == "constant"
                ]
                known = len(trips) == 1
                self.unknown_trip_counts += not known
                inner = times * int(trips[0] if known else 1)
                found += self._schedule(self._called(ins, "body"), inner)
            elif ins.op in ("conditional", "call", "async-start"):
                for name in re.findall(r"%([\w.\-]+)", ins.attrs.split("metadata=")[0]):
                    found += self._schedule(self.computations.get(name, {}), times)
            elif ins.op not in FREE and not ins.op.endswith(("-done", "-update")):
                found.append((ins, computation, times))
        return found

    def hbm_bytes(self, ins: Instruction, computation: Computation) -> float:
        """HBM bytes of one run; of an operand that is only sliced, its slices."""
        operands = [_hbm(computation[a].shape) if a in computation else 0.0 for a in ins.args]
        if ins.op.endswith("-start"):  # an asynchronous copy or slice: its destination's bytes
            at = 0 if ins.op == "copy-start" else len(ins.args)
            from_hbm = bool(operands and operands[0])
            return sum(b.size * (from_hbm + b.in_hbm) for b in buffers(ins.shape)[at : at + 1])
        if ins.op in ("slice", "dynamic-slice", "gather"):
            return 2 * _hbm(ins.shape)
        if ins.op == "dynamic-update-slice":
            return 2 * operands[1]
        total = _hbm(ins.shape)
        body = self._called(ins, "calls") if ins.op == "fusion" else {}
        for i, whole in enumerate(operands):
            read, updated = self._touched(body, i) if body else (None, None)
            total += whole if read is None else min(whole, read)
            if updated is not None:  # the rest of the result is the operand, in place
                total -= max(0, whole - updated)
        return max(total, 0)

    def _touched(self, body: Computation, parameter: int) -> tuple[float | None, float | None]:
        """(bytes read, bytes updated in place) of a fusion's parameter; None means all, none."""
        views = {p.name for p in body.values() if p.op == "parameter" and p.raw == str(parameter)}
        read, updated = 0.0, None

        def size(name: str) -> float:
            return sum(b.size for b in buffers(body[name].shape)) if name in body else 0.0

        for user in body.values():
            at = [i for i, a in enumerate(user.args) if a in views]
            if user.op == "fusion":
                inner = [self._touched(self._called(user, "calls"), i)[0] for i in at]
            else:
                inner = [None]
            same = user.op == "fusion" and len(user.args) == 1 and inner == [None]
            if at and (same or user.op in ("bitcast", "copy", "convert")):
                views.add(user.name)
            elif user.op in ("dynamic-slice", "slice", "gather") and at == [0]:
                read += size(user.name)
            elif user.op == "dynamic-update-slice" and at == [0]:
                updated = (updated or 0) + size(user.args[1])
            elif at:
                read += sum(math.inf if x is None else x for x in inner)
        everything = read == math.inf or list(body)[-1] in views
        return None if everything else read, updated

    def signature(self, ins: Instruction, computation: Computation) -> str:
        """Equal for ops that XLA compiles once and shares."""
        operands = [computation[a].shape for a in ins.args if a in computation]
        body = [b.op + b.shape for b in self._called(ins, "calls").values()]
        return "|".join([ins.op, ins.shape, *operands, *body])
