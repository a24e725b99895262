"""Per-Head Muon: momentum is cut into the matrices that it means, and each is orthogonalised."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from k3jax.sharding.owners import by_owner, on_explicit_mesh

NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c of the quintic iteration
UPDATE_RMS = 0.2  # the range of AdamW's updates, so that one learning rate and one decay serve both
PORTION = (
    2**26
)  # elements that a device of a mesh orthogonalises at a time, or one matrix if larger


class Blocks(NamedTuple):
    """How one weight is cut into matrices A x B; every axis not named is a batch axis.

    Axes are negative, so that the same value serves a layer and a stack of layers or experts.
    """

    inputs: tuple[int, ...]  # axes that form A
    outputs: tuple[int, ...]  # axes that form B
    cuts: tuple[int, ...] = ()  # positions that cut the last axis into parts of their own

    def shapes(self, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """(number of matrices, A, B) of each part of a weight of this shape."""
        edges = (0, *self.cuts, shape[-1])
        parts = [(*shape[:-1], stop - start) for start, stop in itertools.pairwise(edges)]
        result = []
        for part in parts:
            a, b = (math.prod(part[i] for i in axes) for axes in (self.inputs, self.outputs))
            result.append((math.prod(part) // (a * b), a, b))
        return result


@partial(jax.jit, static_argnames=("blocks", "ns_dtype"))  # traced once per shape, not per weight
def orthogonalize(
    x: Float[Array, "..."], blocks: Blocks, ns_dtype: str = "float32"
) -> Float[Array, "..."]:
    """Orthogonalise every block of x, scaled so that a full-rank block has RMS near 0.2.

        X_0 = X / |X|_F;  Y = X X^T;  X <- a X + (b Y + c Y^2) X, five times    (training.md §2.2)
        O = 0.2 sqrt(max(A, B)) X_5                                             (training.md §2.3)

    On a mesh with Explicit axes every block is whole on one device during the iteration, and the
    blocks are shared out; x travels there and X_5 back in ns_dtype, which costs x one more rounding
    to bfloat16 and X_5 none.

    Args:
        x: momentum or its Nesterov combination, in the layout of the weight.
        blocks: the matrices inside x.
        ns_dtype: type of the matrix products, "bfloat16" or "float32".

    Returns: O in float32 and in the layout and sharding of x. Zero blocks stay zero. Singular
        values that start above 1e-2 of the Frobenius norm end in about [0.68, 1.2]; it is not
        meant to be 1.
    Numerics: norms in float32. The block is divided by its largest entry first: squares of tiny
        gradients would vanish, and an epsilon large enough for bfloat16 would damp the update.
    Cost: 5 (4 r^2 s + 2 r^3) FLOPs per block with sides r <= s; the Gram matrix is the small one.
    """
    scales = [UPDATE_RMS * math.sqrt(max(a, b)) for _, a, b in blocks.shapes(x.shape)]
    if blocks.cuts:
        scale = np.repeat(np.array(scales, np.float32), np.diff([0, *blocks.cuts, x.shape[-1]]))
    else:
        (scale,) = scales
    if on_explicit_mesh(x):
        axes = tuple(sorted(blocks.inputs + blocks.outputs))
        place = {axis: i - len(axes) for i, axis in enumerate(axes)}
        packed = blocks._replace(
            inputs=tuple(place[i] for i in blocks.inputs),
            outputs=tuple(place[i] for i in blocks.outputs),
        )
        o = by_owner(partial(_in_portions, blocks=packed, ns_dtype=ns_dtype), x, axes, ns_dtype)
    else:
        o = _newton_schulz(x, blocks, ns_dtype)
    return jnp.asarray(o, jnp.float32) * scale


def _in_portions(x: Float[Array, "N ..."], blocks: Blocks, ns_dtype: str) -> Float[Array, "N ..."]:
    """`_newton_schulz` of a few matrices at a time: it needs several times the memory of its input."""
    size = max(1, PORTION // math.prod(x.shape[1:]))
    if size >= len(x):
        return _newton_schulz(x, blocks, ns_dtype)
    return jax.lax.map(lambda m: _newton_schulz(m, blocks, ns_dtype), x, batch_size=size)


def _newton_schulz(x: Float[Array, "..."], blocks: Blocks, ns_dtype: str) -> Float[Array, "..."]:
    """X_5 of every block, in ns_dtype."""
    if blocks.cuts:
        whole = blocks._replace(cuts=())
        parts = jnp.split(x, blocks.cuts, axis=-1)
        return jnp.concatenate([_newton_schulz(p, whole, ns_dtype) for p in parts], axis=-1)
    axes = (*blocks.inputs, *blocks.outputs)
    x = x.astype(jnp.float32)
    x = x / _nonzero(jnp.max(jnp.abs(x), axis=axes, keepdims=True))
    x = x / _nonzero(jnp.sqrt(jnp.sum(x * x, axis=axes, keepdims=True)))
    # With beta=0 this is Newton-Schulz alone, and the state (a copy of x) is dropped. A coefficient
    # per step makes optax emit a loop: the five steps unrolled compile twice as slowly.
    newton_schulz = scale_by_muon(
        ns_coeffs=(NS_COEFFICIENTS,) * NS_STEPS,
        ns_steps=NS_STEPS,
        beta=0.0,
        eps=1e-30,
        nesterov=False,
        weight_dimension_numbers=MuonDimensionNumbers(blocks.inputs, blocks.outputs),
    )
    x = x.astype(ns_dtype)
    precision = "highest" if ns_dtype == "float32" else "default"  # accelerators round otherwise
    with jax.default_matmul_precision(precision):
        o, _ = newton_schulz.update(x, newton_schulz.init(x))
    return jnp.asarray(o)


def scale_by_per_head_muon(
    blocks: Mapping[str, Blocks], *, momentum: float, nesterov: bool, ns_dtype: str
) -> optax.GradientTransformation:
    """Per-Head Muon without decay and learning rate, as an optax transformation.

        M <- mu M + G;  X = mu M + G (Nesterov) or M;  update = O(X)            (training.md §2.1)

    `optax.contrib.muon` as a whole is another rule: it averages (1 - mu) G with a bias correction,
    which weighs M and G differently in early steps, and shares one epsilon with Adam.

    Args:
        blocks: the matrices of each weight, by path ("layers_0_to_0/layer_0/self_attn/q_proj/kernel").
        momentum: mu in [0, 1).
        nesterov: orthogonalise mu M + G instead of M.
        ns_dtype: type of the matrix products, "bfloat16" or "float32".
    """

    def orthogonalize_all(updates, params):
        del params
        leaves, tree = jax.tree.flatten_with_path(updates)
        alike = defaultdict(list)
        for i, (path, x) in enumerate(leaves):
            cut = blocks[path_name(path)]
            alike[cut, _kind(x, cut) or i].append(i)
        result: list[Array | None] = [None] * len(leaves)
        for (cut, _), members in alike.items():
            xs = [leaves[i][1] for i in members]
            ends = np.cumsum([len(x) for x in xs])
            o = orthogonalize(jnp.concatenate(xs) if len(xs) > 1 else xs[0], cut, ns_dtype)
            for i, part in zip(members, jnp.split(o, ends[:-1]), strict=True):
                result[i] = part
        return tree.unflatten(result)

    return optax.chain(optax.trace(momentum, nesterov), optax.stateless(orthogonalize_all))


def _kind(x: Array, blocks: Blocks) -> tuple | None:
    """What weights have in common whose matrices can be worked on as one array, along axis 0.

    Layers of one kind do, in whichever stack they are: the program has one iteration for all of them,
    and a mesh shares out more matrices at once. None: axis 0 belongs to a matrix, or is sharded.
    """
    spec = jax.typeof(x).sharding.spec
    if -x.ndim in (*blocks.inputs, *blocks.outputs) or (spec and spec[0] is not None):
        return None
    return x.shape[1:], x.dtype, spec


def path_name(path: tuple) -> str:
    """Key path of a pytree leaf as "layers_0_to_0/layer_0/self_attn/q_proj/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _nonzero(x: Array) -> Array:
    return jnp.where(x == 0, 1, x)
