"""Depth: layers scanned, and what of them the backward pass recomputes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Remat = Literal["none", "dots", "full", "routed", "outputs", "offload"]
KEPT: dict[Remat, tuple[str, ...]] = {  # of layers that are recomputed: fields of `Outputs`
    "full": (),
    "routed": ("routed",),
    "outputs": ("routed", "attention"),
    "offload": ("routed", "attention"),
}


class Outputs(NamedTuple):
    """What recomputation may know of a layer already: the most work per byte."""

    routed: Float[Array, "tokens L"] | None = None  # of the routed experts, in the latent
    attention: Float[Array, "B T D"] | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recalled(fn: Callable, kept: Any, *args: Any) -> Any:
    """fn(*args), of which the value was kept: nothing is computed before the backward pass.

    There `fn` runs for what its own derivative needs, and no further: the compiler drops the
    products, and the collectives, that only its value depends on.

    Args:
        fn: closes over nothing that is differentiated.
        kept: fn(*args), of an earlier pass; it gets no gradient.
        args: as in that pass.
    """
    return kept


def _recalled_bwd(fn, args, d):
    _, pull = jax.vjp(fn, *args)
    return (None, *pull(d))


recalled.defvjp(lambda fn, kept, *args: (kept, args), _recalled_bwd)


class Run(NamedTuple):
    """Equal layers that follow each other in a unit, of which the program has one copy."""

    apply: Callable  # one layer; see `scan_units`
    names: tuple[str, ...]
    start: int  # position of the first in the unit

    def scan(self, step: Callable, carry: Any, trees: Any, first: Any, reverse: bool = False):
        """`scan` over the layers; `trees` have a leading axis over them."""
        indices = [first + self.start + j for j in range(len(self.names))]
        return scan(step, carry, trees, indices, reverse)

    def stack(self, by_name: dict[str, Any]) -> Any:
        """What the layers have, with a leading axis over them; a copy, on a mesh of small parts."""
        return jax.tree.map(lambda *x: jnp.stack(x), *(by_name[name] for name in self.names))

    def unstack(self, stacked: Any) -> dict[str, Any]:
        """The reverse of `stack`."""
        return {
            name: jax.tree.map(lambda x, j=j: x[j], stacked) for j, name in enumerate(self.names)
        }


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def scan_units(
    runs: tuple[Run, ...],
    first: tuple[int, ...],
    remat: Remat,
    stacked: Any,
    bank: Array,
    prefix: Array,
    segment_ids: Array | None,
):
    """Scan units of layers, each of them

        apply(params, index, bank, prefix, segment_ids, *, written=False, kept=None)
            -> (bank, prefix, stats, outputs)

    What is inside a layer is recomputed in the backward pass; saved are the prefix that enters each
    layer and the *final* bank, once. The bank is append-only and rows that a layer has not seen are
    masked in it, so its final value stands for the value at every step. Plain autodiff of a scan
    would save one bank per unit.

    Args:
        runs: the layers of one unit, each run with the `apply` of one of its layers.
        first: absolute index of each unit's first layer.
        remat: "full", or one that saves outputs of layers too, on the device or in host memory.
        stacked: parameters and buffers of each layer by name, a leading axis over units.
        bank, prefix: what flows through depth.
        segment_ids: documents of the tokens.

    Returns: bank, prefix, stats by name.
    """
    step = partial(_forward_step, runs, None, segment_ids)
    (bank, prefix), (_, stats) = scan(step, (bank, prefix), stacked, first)
    return bank, prefix, stats


def scan(
    step: Callable, carry: Any, stacked: Any, indices: Sequence[Any], reverse: bool = False
) -> tuple[Any, Any]:
    """Scan `step(carry, (part, index))`; one part alone is called directly, its index as it is."""
    if len(indices) > 1:
        xs = stacked, jnp.asarray(indices, jnp.int32)
        return jax.lax.scan(step, carry, xs, reverse=reverse)
    carry, ys = step(carry, (jax.tree.map(lambda x: x[0], stacked), indices[0]))
    return carry, jax.tree.map(lambda y: y[None], ys)


def _forward_step(runs, remat, segment_ids, carry, xs):
    """One unit: what the backward pass needs (nothing without `remat`) by run, and the stats."""
    by_name, first = xs
    saved, stats = [], {}
    for run in runs:

        def step(carry, xs, run=run):
            params, index = xs
            bank, prefix, stats, outputs = run.apply(params, index, *carry, segment_ids)
            if remat is None:
                return (bank, prefix), (None, stats)
            kept = Outputs(**{field: getattr(outputs, field) for field in KEPT[remat]})
            return (bank, prefix), ((carry[1], kept), stats)

        carry, (kept, of_run) = run.scan(step, carry, run.stack(by_name), first)
        saved.append(kept)
        stats |= run.unstack(of_run)
    return carry, (saved, stats)


def _scan_units_fwd(runs, first, remat, stacked, bank, prefix, segment_ids):
    def step(carry, xs):
        carry, (saved, stats) = _forward_step(runs, remat, segment_ids, carry, xs)
        if remat == "offload":
            saved = jax.device_put(saved, jax.memory.Space.Host)
        return carry, (saved, stats)

    (bank, prefix), (saved, stats) = scan(step, (bank, prefix), stacked, first)
    return (bank, prefix, stats), (stacked, bank, saved, segment_ids)


def _scan_units_bwd(runs, first, remat, saved, cotangents):
    stacked, bank, saved, segment_ids = saved
    d_bank, d_prefix, _ = cotangents

    def unit(carry, xs):
        (by_name, saved), first = xs
        if remat == "offload":
            saved = jax.device_put(saved, jax.memory.Space.Device)
        gradients = {}
        for run, saved_of_run in zip(reversed(runs), reversed(saved), strict=True):

            def step(carry, xs, run=run):
                (params, (prefix, kept)), index = xs

                def layer(params, bank, prefix):
                    known = {"written": True, "kept": kept}
                    return run.apply(params, index, bank, prefix, segment_ids, **known)[:2]

                _, pull = jax.vjp(layer, params, bank, prefix)
                d_params, *carry = pull(carry)
                return tuple(carry), d_params

            trees = run.stack(by_name), saved_of_run
            carry, stacked = run.scan(step, carry, trees, first, reverse=True)
            # The next layers wait for these gradients: the compiler would put off what no one waits
            # for, and keep the intermediates of both.
            carry, stacked = jax.lax.optimization_barrier((carry, stacked))
            gradients |= run.unstack(stacked)
        return carry, gradients

    (d_bank, d_prefix), d_stacked = scan(
        unit, (d_bank, d_prefix), (stacked, saved), first, reverse=True
    )
    return d_stacked, d_bank, d_prefix, None


scan_units.defvjp(_scan_units_fwd, _scan_units_bwd)
