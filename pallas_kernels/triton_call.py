"""Calls a Triton kernel from JAX: compiled for an NVIDIA GPU, or interpreted on a CPU.

Interpreted (TRITON_INTERPRET=1, set before triton is imported, as the tests do), every program of
the grid runs in NumPy over memory that holds NaN, one after the other: slow, and exact about which
elements a kernel reads and writes.
"""

import contextlib
import contextvars
import functools
import importlib.util
import inspect
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.pallas_kernels import dispatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST = 8.0  # compute capability: earlier GPUs have no bfloat16 matmul


@dataclass(frozen=True)
class Call:
    """A launch, as `triton_call` received it."""

    kernel: Any
    args: tuple
    out_shape: list[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    constants: dict[str, Any]


_recorded: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar(
    "recorded", default=None
)


@contextlib.contextmanager
def record():
    """Inside, launches go to the list that this yields, and nothing runs."""
    token = _recorded.set(calls := [])
    try:
        yield calls
    finally:
        _recorded.reset(token)


@functools.cache
def _missing() -> str | None:
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; pip install 'k3jax[triton]'"
    return None


def capability(without: float = 9.0) -> float:
    """Compute capability of the GPU; `without`, an H100's, where there is none."""
    return float(getattr(jax.local_devices()[0], "compute_capability", without))


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest that is not below n or `least`: Triton's tiles have no other sizes."""
    return max(least, 1 << (n - 1).bit_length())


def unavailable() -> str | None:
    """Why no Triton kernel can run here, or None."""
    if (reason := _missing()) is not None:
        return reason
    here = dispatch.platform()
    if _recorded.get() is not None:
        return None
    if here == "gpu":
        if (found := capability()) < OLDEST:
            return f"compute capability {found}; needs {OLDEST}"
        return None
    if here == "cpu" and INTERPRETED:
        return None
    return f"this is a {here}; needs an NVIDIA GPU, or TRITON_INTERPRET=1"


def triton_call(
    kernel,
    *args: jax.Array | int | float,
    out_shape: list[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 2,
    aliases: dict[int, int] | None = None,
    zeroed: tuple[int, ...] = (),
    **constants,
) -> list[jax.Array]:
    """Runs `kernel(*args, *outputs, **constants)` once per point of the grid.

    Args:
        kernel: a function under `triton.jit`.
        args: arrays, row-major, and scalars, in the order of the kernel's parameters.
        out_shape: shapes and dtypes of the outputs, which hold anything at first.
        grid: programs along up to three axes; the first may be as long as 2**31 - 1, the others
            65,535 (KF-010).
        num_warps, num_stages: as Triton's own.
        aliases: argument -> output that takes its memory over; the kernel writes through the
            argument and leaves the output's own parameter alone.
        zeroed: outputs that hold zeros at first.
        constants: compile-time arguments.
    """
    if any(n > 65535 for n in grid[1:]) or grid[0] > 2**31 - 1:
        raise ValueError(f"grid {grid}: only the first axis may exceed 65,535")
    if (calls := _recorded.get()) is not None:
        calls.append(Call(kernel, args, out_shape, grid, num_warps, num_stages, constants))
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]
    if dispatch.platform() == "gpu":
        import jax_triton

        return _launch(
            jax_triton.triton_call, kernel, args, out_shape, aliases or {}, constants, grid=grid,
            num_warps=num_warps, num_stages=num_stages, zeroed_outputs=zeroed,
        )  # fmt: skip
    _repair_interpreter()
    _interpreter()
    arrays = [i for i, x in enumerate(args) if isinstance(x, jax.Array | np.ndarray)]

    def run(*values):
        inputs = dict(zip(arrays, (np.array(v) for v in values), strict=True))
        outputs = [_poisoned(x) for x in out_shape]
        for i in zeroed:
            outputs[i][...] = 0
        for i, o in (aliases or {}).items():
            outputs[o] = inputs[i]
        every = [_Buffer(inputs[i]) if i in inputs else x for i, x in enumerate(args)]
        every += [_Buffer(x) for x in outputs]
        _interpreter().submit(_interpret, kernel, grid, every, constants).result()
        return outputs

    return jax.pure_callback(run, out_shape, *(args[i] for i in arrays), vmap_method=None)


def _launch(launch, kernel, args, out_shape, aliases, constants, **options):
    """By jax-triton 0.3, or by 0.4, which renamed the outputs, takes a Python float for float32, and
    gives the kernel no pointer to an output that is an input's memory."""
    if "out_type" not in inspect.signature(launch).parameters:
        return launch(
            *args, kernel=kernel, out_shape=out_shape, input_output_aliases=aliases, **options,
            **constants,
        )  # fmt: skip
    unused = {kernel.arg_names[len(args) + output]: 0 for output in aliases.values()}
    args = [float(x) if isinstance(x, np.float32) else x for x in args]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the aliases, for references
        return launch(
            *args, kernel=kernel, out_type=out_shape, input_output_aliases=aliases, **options,
            **constants, **unused,
        )  # fmt: skip


def _interpret(kernel, grid, args, constants):
    with np.errstate(all="ignore"):
        kernel[grid](*args, **constants)


@functools.cache
def _interpreter() -> ThreadPoolExecutor:
    """A thread of its own: those of XLA round numbers below 2**-126 to zero, as no GPU does."""
    executor = ThreadPoolExecutor(1)
    executor.submit(int).result()  # it inherits the rounding of the thread that starts it, here
    return executor


@functools.cache
def _repair_interpreter() -> None:
    """What Triton 3.6 interprets otherwise than it compiles.

    Loop bounds are arrays of one element, which NumPy 2.5 no longer takes for integers; float32 is
    cut off instead of rounded to bfloat16; a product of bfloat16 multiplies their codes.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    create_dot = interpreter.InterpreterBuilder.create_dot

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def converted(x, source, target, rounding):
        if (source, target) == (tl.float32, tl.bfloat16):
            return np.ascontiguousarray(x).astype(jnp.bfloat16).view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(x).view(jnp.bfloat16).astype(np.float32).view(np.uint32)
        return convert(x, source, target, rounding)

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        codes = converted(x.data, tl.bfloat16, tl.float32, None)
        return interpreter.TensorHandle(codes.view(np.float32), tl.float32)

    def dot(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    for place, name, repaired in (
        (interpreter, "_patch_lang_tensor", patched),
        (interpreter, "_convert_float", converted),
        (interpreter.InterpreterBuilder, "create_dot", dot),
    ):
        setattr(place, name, repaired)


def _poisoned(x: jax.ShapeDtypeStruct) -> np.ndarray:
    wild = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else np.iinfo(x.dtype).max
    return np.full(x.shape, wild, x.dtype)


class _Buffer:
    """A NumPy array with the few methods by which Triton's interpreter knows a tensor."""

    def __init__(self, array: np.ndarray):
        self._array, self.dtype = array, str(array.dtype)

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def untyped_storage(self) -> "_Buffer":
        return self

    def cpu(self) -> "_Buffer":
        return self

    def new_empty(self, *_, **__) -> "_Buffer":
        return _Buffer(self._array)

    def set_(self, *_) -> None: ...

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self._array.shape

    def stride(self) -> tuple[int, ...]:
        return self._array.strides

    def copy_(self, _) -> None: ...
