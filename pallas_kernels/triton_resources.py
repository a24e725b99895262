"""What the CUDA compiler makes of Triton kernels, on a machine without a GPU.

`resources(f, *shapes)` traces f for a GPU, compiles every Triton kernel in it down to machine code
and reports registers, spills and shared memory: enough to see whether a kernel fits a GPU, and
that it does not spill, before it runs on one.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import triton
import triton.knobs
from triton.backends.compiler import GPUTarget

from k3jax.pallas_kernels.triton_call import Call, record

# Shared memory that a program may have, bytes, by compute capability.
MOST_SHARED = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@dataclass(frozen=True)
class Resources:
    """Of one kernel: per thread, and per program."""

    kernel: str
    constants: dict
    num_warps: int
    registers: int
    spilled: int  # bytes of registers kept in memory, per thread
    shared: int  # bytes
    tensor_core: str  # wgmma, mma or none
    ptx: str


def resources(function, *args, capability: int = 90) -> list[Resources]:
    """Of the Triton kernels that `function(*args)` would launch on a GPU.

    Args:
        function: what to trace; its ops choose backends as on one GPU.
        args: arrays or `jax.ShapeDtypeStruct`s.
        capability: compute capability times ten.
    """
    device = jax.sharding.AbstractDevice("NVIDIA", None, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("_",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), record() as calls:
        jax.make_jaxpr(function)(*args)
    return [_compile(call, capability) for call in calls]


_TYPES = {
    "bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "int32": "i32", "uint8": "u8",
    "int64": "i64", "bool": "i1", "int8": "i8",
}  # fmt: skip


def _compile(call: Call, capability: int) -> Resources:
    kernel, signature, constants = call.kernel, {}, dict(call.constants)
    for name, x in zip(kernel.arg_names, (*call.args, *call.out_shape), strict=False):
        if hasattr(x, "shape") and not isinstance(x, np.generic):
            signature[name] = "*" + _TYPES[str(x.dtype)]
        elif isinstance(x, int):
            signature[name] = "i32"
            if x == 1:  # as jax-triton does
                constants[name] = 1
        else:
            signature[name] = "fp32" if isinstance(x, np.float32) else "fp64"
    names = list(kernel.arg_names)
    aligned = [["tt.divisibility", 16]]
    attrs = {(names.index(n),): aligned for n, t in signature.items() if t.startswith("*")}
    signature |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, signature, constants, attrs)
    options = {"num_warps": call.num_warps, "num_stages": call.num_stages}
    compiled = triton.compile(source, GPUTarget("cuda", capability, 32), options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _assemble(ptx, capability)
    cores = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none"
    return Resources(
        kernel.__name__, call.constants, call.num_warps, registers, spilled,
        compiled.metadata.shared, cores, ptx,
    )  # fmt: skip


def _assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes per thread, from ptxas."""
    nvidia = triton.knobs.nvidia
    ptxas = (nvidia.ptxas_blackwell if capability >= 100 else nvidia.ptxas).path
    arch = f"sm_{capability}" + ("a" if capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={arch}", str(source), "-o", f"{folder}/kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", report))
    return registers, spilled
