"""Compiles functions for TPU topologies in a process of its own: libtpu reads its flags once.

    python -m k3jax.pallas_kernels.tpu_cost.worker SPEC

SPEC is JSON: `cases`, each with `target` ("module:factory"), `kwargs`, `topology` and perhaps
`flags` (XLA compiler options); `out`, a folder; and perhaps `kernel`, the number of a Pallas kernel to compile alone. One line of JSON per
case goes to out/done.jsonl as soon as the case has compiled, its program to out/hlo.txt. An error
ends the process: the caller knows from the lines which case it was, and starts anew behind it.
"""

import json
import math
import pkgutil
import re
import sys
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import layout, topologies
from jax.experimental.pallas import Squeezed
from jax.extend.core import Literal
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

ELSEWHERE = "any|hbm|smem|sem"  # memory spaces other than VMEM, the default


def main(spec: dict[str, Any]) -> None:
    if util.find_spec("libtpu") is None:
        sys.exit(f"libtpu, the TPU compiler, is missing from {sys.executable}; use the extra `aot`")
    out = Path(spec["out"])
    with (out / "done.jsonl").open("w") as done:
        for case in spec["cases"]:
            begin = time.perf_counter()
            compiled, info = _compile(case, spec.get("kernel"))
            info["compile_seconds"] = round(time.perf_counter() - begin, 2)
            memory = compiled.memory_analysis()
            info["memory"] = {
                kind: getattr(memory, kind + "_size_in_bytes")
                for kind in ("argument", "output", "temp", "alias")
            }
            (out / "hlo.txt").write_text(compiled.as_text())
            print(json.dumps(info), file=done, flush=True)


def _compile(case: dict[str, Any], kernel: int | None) -> tuple[Any, dict[str, Any]]:
    """The compiled program of a case, or of one of its kernels, and what its jaxpr says."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=case["topology"])
    device = topology.devices[0]
    here = SingleDeviceSharding(device)
    # pltpu.get_tpu_info() asks the abstract mesh; jax.devices() stays the CPU.
    kind = AbstractDevice(
        device_kind=device.device_kind, num_cores=device.num_cores, platform="tpu"
    )
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        function, args = pkgutil.resolve_name(case["target"])(**case["kwargs"])
        args = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), tuple(args)
        )
        jitted = function if hasattr(function, "trace") else jax.jit(function)
        traced, kernels = jitted.trace(*args), []
        flops = _walk(traced.jaxpr, 1, kernels)
        if kernel is not None:
            function, args = _contiguous(kernels[kernel])
            # Layouts of XLA's choice, or it adds copies around the kernel.
            free = layout.Format(layout.Layout.AUTO, here)
            traced = jax.jit(function, in_shardings=free, out_shardings=free).trace(*args)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile(case.get("flags") or None)
    return compiled, {
        "device_kind": device.device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "flops": flops,
        "kernels": [_describe(eqn) for eqn in kernels],
    }


def _walk(jaxpr: Any, times: int, kernels: list[Any]) -> int:
    """Matmul flops of a jaxpr that runs `times` times; lists its Pallas kernels.

    Of a conditional every branch counts, of a while loop the body once.
    """
    flops = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            left = eqn.invars[0].aval.shape
            contracted = math.prod(left[d] for d in params["dimension_numbers"][0][0])
            flops += times * 2 * math.prod(eqn.outvars[0].aval.shape) * contracted
        elif name == "pallas_call":
            kernels.append(eqn)
            flops += times * _walk(params["jaxpr"], math.prod(_grid(eqn)), [])
        else:
            inner = times * (params["length"] if name == "scan" else 1)
            for value in params.values():
                for sub in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(getattr(sub, "jaxpr", sub), "eqns"):
                        flops += _walk(sub, inner, kernels)
    return flops


def _grid(eqn: Any) -> list[int]:
    return [n if isinstance(n, int) else 1 for n in eqn.params["grid_mapping"].grid]


def _describe(eqn: Any) -> dict[str, Any]:
    """A Pallas kernel: what identifies it, its flops, what it moves and what it holds on chip."""
    params, grid = eqn.params, _grid(eqn)
    refs = [v.aval for v in params["jaxpr"].invars]
    on_chip = [a for a in refs if not re.search(ELSEWHERE, str(a.memory_space).lower())]
    return {
        "name": params["name"],
        "grid": grid,
        "outs": [list(a.shape) for a in params["out_avals"]],
        "flops": _walk(params["jaxpr"], math.prod(grid), []),
        "block_bytes": _block_bytes(params["grid_mapping"], grid),
        "vmem_bytes": sum(math.prod(a.shape) * a.dtype.itemsize for a in on_chip),
    }


def _windowed(mapping: Any) -> bool:
    """Whether the grid pipeline copies this operand to VMEM block by block."""
    space = str(getattr(mapping.transformed_block_aval, "memory_space", "")).lower()
    dims = {type(b).__name__ for b in mapping.block_shape}
    return (
        not re.search(ELSEWHERE, space)
        and not mapping.transforms
        and dims <= {"Blocked", "Squeezed"}
    )


def _block_bytes(grid_mapping: Any, grid: list[int]) -> int | None:
    """Bytes the grid pipeline moves (a block when its index changes); None where not known."""
    mappings = grid_mapping.block_mappings
    if grid_mapping.num_index_operands or not grid or math.prod(grid) > 4_000_000:
        return None
    if not all(_windowed(m) for m in mappings):
        return None
    index, total = np.indices(grid, dtype=np.int32).reshape(len(grid), -1), 0
    for m in mappings:
        block, index_map = m.transformed_block_aval, m.index_map_jaxpr
        at = jax.vmap(lambda *i, f=index_map: jax.core.eval_jaxpr(f.jaxpr, f.consts, *i))(*index)
        at = np.stack([np.broadcast_to(np.asarray(x), index.shape[1:]) for x in at])
        copies = 1 + int(np.any(at[:, 1:] != at[:, :-1], axis=0).sum())
        total += copies * math.prod(block.shape) * block.dtype.itemsize
    return total


def _contiguous(eqn: Any) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The kernel alone, its operands stored block by block, and their shapes.

    libtpu's profiler aborts on a block strided over two dimensions (heads x tokens); like this
    every copy is plain.
    """
    params, grid_mapping, mappings = eqn.params, eqn.params["grid_mapping"], []
    zero = Literal(np.int32(0), jax.core.ShapedArray((), np.int32))
    for m in grid_mapping.block_mappings:
        if _windowed(m):
            index_map = m.index_map_jaxpr
            kept = [b for b in m.block_shape if type(b).__name__ == "Blocked"]
            blocks = [
                -(-n // getattr(b, "block_size", 1))
                for n, b in zip(m.array_aval.shape, m.block_shape, strict=True)
            ]
            moving = [
                v for v, n in zip(index_map.jaxpr.outvars, blocks, strict=True) if n > 1
            ]  # only the dimensions with several blocks
            lead = [n for n in blocks if n > 1]
            m = m.replace(
                block_shape=(*[Squeezed()] * len(lead), *kept),
                index_map_jaxpr=index_map.replace(
                    outvars=moving + [zero] * len(kept),
                    debug_info=index_map.debug_info._replace(result_paths=None),
                ),
                array_aval=m.array_aval.update(shape=(*lead, *(b.block_size for b in kept))),
                index_map_out_tree=jax.tree.structure((0,) * (len(lead) + len(kept))),
            )
        mappings.append(m)
    arrays = [m.array_aval for m in mappings]
    inputs, outputs = arrays[: grid_mapping.num_inputs], arrays[grid_mapping.num_inputs :]
    changed = dict(
        params,
        grid_mapping=grid_mapping.replace(block_mappings=tuple(mappings)),
        input_output_aliases=(),
        out_avals=tuple(
            a.update(shape=b.shape) for a, b in zip(params["out_avals"], outputs, strict=False)
        ),
    )
    scalars = [v.aval for v in eqn.invars[: len(eqn.invars) - grid_mapping.num_inputs]]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in scalars + inputs]
    return lambda *xs: eqn.primitive.bind(*xs, **changed), shapes


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
