"""KDA on one GPU: k3jax's kernels beside flash-linear-attention's, times and errors.

    python -m benchmarks.gpu.kda k3jax fla

bfloat16 q, k, v, decay logits and logits of beta; norms, gate (g >= -5), sigmoid and recurrence count,
forward, and forward with all seven gradients. Both implementations get the same numbers, each in a
process of its own: JAX and PyTorch do not share a GPU's memory well. The truth is the recurrence in
float64; an error is |x - truth| / |truth| in the 2-norm. Times are medians: of CUDA events around a
call for PyTorch, of 20 queued calls for JAX, which has none. fla tunes its kernels first, which takes
minutes. JSON lines.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

if sys.argv[1:] == ["fla"]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for the truth alone

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import gate
from k3jax.pallas_kernels.kda import kda_from_logits

CASES = ((1, 8192, 16), (1, 32768, 16), (8, 2048, 16), (1, 8192, 96))  # B, T, H
CHECKED = (1, 1024, 2)
K, G_MIN = 128, -5.0
NAMES = ("q", "k", "v", "z", "beta_logits", "A_log", "dt_bias")
QUEUED, REPEATS = 20, 5


def draw(B: int, T: int, H: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Arguments in the order of `NAMES`, and the gradient of the output; float32."""
    rng = np.random.default_rng(0)
    wide = [rng.standard_normal((B, T, H, K), np.float32) for _ in range(5)]
    beta, A_log = rng.standard_normal((B, T, H), np.float32), rng.random(H, np.float32) / 2
    return [*wide[:4], beta, A_log, rng.random((H, K), np.float32)], wide[4]


class K3jax:
    """Calls of k3jax on one set of inputs."""

    def __init__(self, args: list[np.ndarray], d_o: np.ndarray, backend: str | None = None):
        self._args = [jnp.asarray(x, jnp.bfloat16 if x.ndim > 2 else jnp.float32) for x in args]
        self._d_o = jnp.asarray(d_o, jnp.bfloat16)
        self._forward = jax.jit(functools.partial(attention, backend=backend))
        self._gradients = jax.jit(functools.partial(gradients, backend=backend))

    def forward(self) -> Any:
        return self._forward(*self._args)

    def gradients(self) -> Any:
        return self._gradients(self._d_o, *self._args)

    def results(self) -> list[np.ndarray]:
        return [np.asarray(x, np.float64) for x in self.gradients()]

    def milliseconds(self, call: Callable[[], Any]) -> float:
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            for _ in range(QUEUED):
                out = call()
            jax.block_until_ready(out)
            times.append((time.perf_counter() - begin) / QUEUED * 1e3)
        return statistics.median(times)


def attention(q, k, v, z, b, A_log, dt_bias, backend=None):
    wide = jnp.promote_types(b.dtype, jnp.float32)
    beta = jax.nn.sigmoid(b.astype(wide))
    return kda_from_logits(q, k, v, z, beta, A_log, dt_bias, g_min=G_MIN, backend=backend)[0]


def gradients(d_o, *args, backend=None):
    o, pull = jax.vjp(functools.partial(attention, backend=backend), *args)
    return o, *pull(d_o)


def truth(args: list[np.ndarray], d_o: np.ndarray) -> list[np.ndarray]:
    """Output and gradients in float64, of the numbers that bfloat16 leaves."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        rounded = [jnp.asarray(x, jnp.bfloat16) if x.ndim > 2 else x for x in (*args, d_o)]
        *args, d_o = (jnp.asarray(x, jnp.float64) for x in rounded)
        found = jax.jit(functools.partial(gradients, backend="reference"))(d_o, *args)
        return [np.asarray(x) for x in found]


class Fla:
    """Calls of flash-linear-attention on one set of inputs."""

    def __init__(self, args: list[np.ndarray], d_o: np.ndarray):
        import torch
        from fla.ops.kda import chunk_kda

        def on_gpu(x):
            x = torch.from_numpy(x).cuda()
            return x.bfloat16() if x.ndim > 2 else x

        self._torch, self._op, self._d_o = torch, chunk_kda, on_gpu(d_o)
        self._args = [on_gpu(x).requires_grad_() for x in args]

    def _call(self) -> Any:
        q, k, v, z, b, A_log, dt_bias = self._args
        return self._op(
            q=q, k=k, v=v, g=z, beta=b, A_log=A_log, dt_bias=dt_bias.reshape(-1), scale=K**-0.5,
            use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=True, lower_bound=G_MIN,
        )[0]  # fmt: skip

    def forward(self) -> Any:
        with self._torch.inference_mode():
            return self._call()

    def gradients(self) -> Any:
        o = self._call()
        return o, *self._torch.autograd.grad(o, self._args, self._d_o)

    def results(self) -> list[np.ndarray]:
        return [x.detach().double().cpu().numpy() for x in self.gradients()]

    def milliseconds(self, call: Callable[[], Any]) -> float:
        torch, times = self._torch, []
        for _ in range(QUEUED + REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in times)


IMPLEMENTATIONS = {"k3jax": K3jax, "fla": Fla}


def measure(name: str) -> None:
    """Prints the errors, then the times of one implementation."""
    make = IMPLEMENTATIONS[name]
    if name == "fla":
        from benchmarks.gpu.tuning import compile_candidates_at_once

        compile_candidates_at_once()
    inputs = draw(*CHECKED)
    found, want = make(*inputs).results(), truth(*inputs)
    off = {
        n: float(f"{np.linalg.norm(x - y) / np.linalg.norm(y):.2e}")
        for n, x, y in zip(("o", *NAMES), found, want, strict=True)
    }
    print(json.dumps({"impl": name, "B, T, H": CHECKED, "errors": off}), flush=True)
    calls = [make(*draw(*case)) for case in CASES]
    for each in calls:
        for call in (each.forward, each.gradients):
            for _ in range(2):
                call()
            each.milliseconds(call)
    gate.wait()
    for case, each in zip(CASES, calls, strict=True):
        times = {
            mode: round(each.milliseconds(call), 4)
            for mode, call in (("fwd", each.forward), ("fwd+bwd", each.gradients))
        }
        print(json.dumps({"impl": name, "B, T, H": case, "ms": times}), flush=True)


def main(names: list[str]) -> None:
    if len(names) == 1:
        measure(names[0])
        return
    for name in names or IMPLEMENTATIONS:
        subprocess.run([sys.executable, "-m", "benchmarks.gpu.kda", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
