"""What the loss of K3 costs on a TPU: `uv run --extra aot --with tokamax==0.0.17 python benchmarks/loss.py`.

Sum of the cross-entropy and its gradients for the activations and the head, of 8,192 tokens and 163,840 classes; ours
beside tokamax. Nothing runs: libtpu compiles, and `tpu_cost` counts instructions and bytes.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from k3jax.losses import cross_entropy
from k3jax.pallas_kernels.tpu_cost import TOPOLOGIES
from k3jax.pallas_kernels.tpu_cost.compare import Case, compare

TOKENS, WIDTH, VOCAB = 8192, 7168, 163_840


def _tokamax(implementation: str) -> Callable[..., jax.Array]:
    package = "tokamax._src.ops.linear_softmax_cross_entropy_loss"
    api = importlib.import_module(f"{package}.api")
    # It asks the default device, here a CPU, whether it can run.
    for op in api.IMPLEMENTATIONS.values():
        type(op).supported_on = lambda self, device: True
        if hasattr(op, "vjp"):
            type(op.vjp).supported_on = lambda self, device: True

    def nats(h, kernel, targets, weights):
        return api.linear_softmax_cross_entropy_loss(
            h, targets, kernel.astype(h.dtype), implementation=implementation
        )

    return nats


def case(impl: str, tokens: int, backward: bool, chunk: int | None = None):
    """(function, shapes): the loss, with `backward` also both gradients."""

    def ours(h, kernel, targets, weights):
        options = {} if chunk is None else {"chunk": chunk}
        return cross_entropy(h, kernel, targets, weights, **options).nats

    run = ours if impl == "k3jax" else _tokamax(impl)
    shapes = (
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((WIDTH, VOCAB), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
        jax.ShapeDtypeStruct((tokens,), jnp.float32),
    )
    return (jax.value_and_grad(run, (0, 1)) if backward else run), shapes


def _floor(tokens: int, backward: bool) -> dict[str, float]:
    """One product forward and two backward; the float32 kernel, read once, and its gradient, written once."""
    product, kernel = 2.0 * tokens * WIDTH * VOCAB, 4.0 * WIDTH * VOCAB
    hidden = 2.0 * tokens * WIDTH
    if backward:
        return {"flops": 3 * product, "moved": 2 * kernel + 2 * hidden}
    return {"flops": product, "moved": kernel + hidden}


def main(
    chips: tuple[str, ...] = tuple(TOPOLOGIES),
    tokens: int = TOKENS,
    chunks: tuple[int, ...] = (),
    peers: tuple[str, ...] = ("mosaic_tpu", "chunked_xla"),
    simulate: bool = False,
) -> None:
    """Estimates ours and the peers.

    Args:
        chips: v5e, v5p, v6e, tpu7x.
        tokens: of the batch.
        chunks: of ours, beside its own choice.
        peers: implementations of tokamax, where it can be imported.
        simulate: also latencies: an hour for each case.
    """
    cases = []
    for name, backward in (("fwd", False), ("fwd+bwd", True)):
        impls: dict[str, dict[str, Any]] = {"k3jax": {"impl": "k3jax"}}
        impls |= {f"k3jax, {n} a chunk": {"impl": "k3jax", "chunk": n} for n in chunks}
        if importlib.util.find_spec("tokamax"):
            impls |= {f"tokamax {peer}": {"impl": peer} for peer in peers}
        problem = {"N": tokens, "D": WIDTH, "X": VOCAB, "dtype": "bfloat16", "pass": name}
        for impl, kwargs in impls.items():
            kwargs = {"tokens": tokens, "backward": backward, **kwargs}
            cases.append(
                Case(
                    op="loss",
                    impl=impl,
                    problem=problem,
                    target="benchmarks.loss:case",
                    kwargs=kwargs,
                    **_floor(tokens, backward),
                )
            )
    compare(cases, chips, simulate=simulate)


if __name__ == "__main__":
    tyro.cli(main)
