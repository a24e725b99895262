"""The GPU's kernels through the real compilers, without a GPU: they fit an H200 and hardly spill."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton comes with Linux only")

# Per op: the call, its arrays, and the bytes that a thread of any of its kernels may spill.
HEAD = """
import jax, jax.numpy as jnp
from k3jax.pallas_kernels.triton_resources import MOST_SHARED, resources
def array(*shape, dtype=jnp.bfloat16): return jax.ShapeDtypeStruct(shape, dtype)
def both(f):
    def run(*args):
        out, pull = jax.vjp(f, *args)
        return pull(out)
    return run
F32, I32 = jnp.float32, jnp.int32
"""
CALLS = {
    "kda": """
from k3jax.pallas_kernels.kda import kda_from_logits
x = array(2, 4096, 8, 128)
args = x, x, x, x, array(2, 4096, 8), array(8, dtype=F32), array(8, 128, dtype=F32)
f, most = lambda *a: kda_from_logits(*a, g_min=-5.0, backend="triton_gpu")[0], 512
""",
    "kda_packed": """
from k3jax.pallas_kernels.kda import kda_from_logits
x = array(2, 4096, 96, 128)
args = x, x, x, x, array(2, 4096, 96), array(96, dtype=F32), array(96, 128, dtype=F32)
ids = jnp.ones((2, 4096), I32)
f, most = lambda *a: kda_from_logits(*a, g_min=-5.0, segment_ids=ids, backend="triton_gpu")[0], 1024
""",
    "mla_attention": """
from k3jax.pallas_kernels.mla_attention.api import mla_attention
args = array(1, 8192, 16, 192), array(1, 8192, 16, 128), array(1, 8192, 64), array(1, 8192, 16, 128)
f, most = lambda *a: mla_attention(*a, scale=192**-0.5, backend="triton_gpu")[0], 64
""",
    "experts": """
from k3jax.layers.feed_forward import ActivationConfig
from k3jax.pallas_kernels.grouped_matmul.api import experts
E, L, F, M = 64, 1024, 512, 16384
args = array(M, L), array(E, L, F), array(E, L, F), array(E, F, L), array(M, dtype=F32)
sizes, activation = jnp.full(E, M // E, I32), ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0)
f, most = lambda *a: experts(*a, sizes, activation, backend="triton_gpu"), 64
""",
    "short_conv": """
from k3jax.pallas_kernels.short_conv.api import short_conv
args = array(1, 8192, 16, 128), array(4, 16, 128)
f, most = lambda *a: short_conv(*a, segment_ids=jnp.ones((1, 8192), I32), backend="triton_gpu")[0], 0
""",
    "attention_residuals": """
from k3jax.pallas_kernels.attention_residuals.api import attention_residuals
args = array(8, 1, 1024, 7168), array(1, 1024, 7168), array(7168), array(7168), array(7168)
def f(bank, prefix, query, norm, out_norm):
    mix = attention_residuals(bank, 8, prefix, query, norm, eps=1e-6, out_norm=out_norm,
                              out_eps=1e-6, backend="triton_gpu")
    return mix[0]
most = 0
""",
    "situ": """
from k3jax.pallas_kernels.situ.api import situ
args = array(4096, 3072), array(4096, 3072)
f, most = lambda *a: situ(*a, 4.0, 25.0, backend="triton_gpu"), 0
""",
}
# Of these the kernels are products of matrices.
PRODUCTS = {"kda", "kda_packed", "mla_attention", "experts"}
TAIL = """
found = resources(both(f), *args)
assert found
for r in found:
    assert r.shared <= MOST_SHARED[90], (r.kernel, r.shared)
    assert r.spilled <= most, (r.kernel, r.spilled)
    print(r.kernel, r.num_warps, r.registers, r.spilled, r.shared, r.tensor_core)
"""


@pytest.mark.parametrize("op", CALLS)
def test_kernels_compile_for_an_h200(op):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "JAX_PLATFORMS": "cpu"
    }
    program = HEAD + CALLS[op] + TAIL
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("mma" in done.stdout) == (op in PRODUCTS), done.stdout  # which run on the tensor cores
