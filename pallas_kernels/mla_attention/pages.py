"""Paged latents: where a token lies, and a walk over the pages of all requests at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def write_pages(
    pages: Float[Array, "P S C"],
    page_table: Int[Array, "B M"],
    position: Int[Array, "B T"],
    rows: Float[Array, "B T C"],
    real: Bool[Array, "B T"],
) -> Float[Array, "P S C"]:
    """The pages with one row more per real token; in place if the compiled step donates them.

    Args:
        pages: S tokens each.
        page_table: pages of each request in order.
        position: index of each token in its request; one past the table is dropped.
        rows: what to write.
        real: False for padding, which is not written.
    """
    count, size, _ = pages.shape
    inside = real & (position < page_table.shape[1] * size)
    page = jnp.take_along_axis(page_table, jnp.where(inside, position // size, 0), axis=1)
    page = jnp.where(inside, page, count)  # past the last page: dropped
    return pages.at[page, position % size].set(rows.astype(pages.dtype), mode="drop")


def walk_pages(
    visit: Callable[[Any, Float[Array, "B K C"], Int[Array, " K"]], Any],
    carry: Any,
    pages: Float[Array, "P S C"],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    *,
    tokens: int,
) -> Any:
    """carry = visit(carry, rows, positions) over the requests' tokens, some pages at a time.

    The walk ends with the longest request. Where a visit of positions that are past a request's end
    leaves its carry as it is, no request can tell with which others it came.

    Args:
        visit: rows hold zeros past a request's length, whatever the pages do.
        carry: of the first visit.
        pages, page_table: as in `write_pages`; entries past a request's length are not looked at.
        lengths: tokens of each request.
        tokens: of a visit, rounded to whole pages.
    """
    size, most = pages.shape[1], page_table.shape[1]
    together = min(max(tokens // size, 1), most)
    steps = -(-most // together)
    page_table = jnp.pad(page_table, ((0, 0), (0, steps * together - most)))

    def step(i, carry):
        first = i * together
        ids = jax.lax.dynamic_slice_in_dim(page_table, first, together, axis=1)
        used = (first + jnp.arange(together)) * size < lengths[:, None]
        rows = pages[jnp.where(used, ids, 0)]  # B together S C
        rows = rows.reshape(rows.shape[0], together * size, rows.shape[3])
        positions = first * size + jnp.arange(together * size)
        real = positions < lengths[:, None]
        # Not only masked: 0 * NaN from a page's earlier use would still be NaN.
        return visit(carry, jnp.where(real[..., None], rows, 0), positions)

    if steps == 1:
        return step(0, carry)
    last = -(-jnp.max(lengths, initial=0) // (together * size))
    return jax.lax.fori_loop(0, jnp.minimum(last, steps), step, carry)


class Softmax(NamedTuple):
    """A softmax-weighted sum over the keys met so far, not yet divided."""

    top: Float[Array, "*rows"]  # largest logit, -inf before the first
    total: Float[Array, "*rows"]  # sum of exp(logit - top)
    mixed: Float[Array, "*rows V"]  # sum of exp(logit - top) times the value


def empty_softmax(shape: tuple[int, ...], dtype: Any) -> Softmax:
    """Before the first key, for sums of this shape."""
    zeros = jnp.zeros(shape, dtype)
    return Softmax(jnp.full(shape[:-1], -jnp.inf, dtype), zeros[..., 0], zeros)


def join_softmax(
    before: Softmax,
    logits: Float[Array, "*rows K"],
    mix: Callable[[Float[Array, "*rows K"]], Float[Array, "*rows V"]],
) -> Softmax:
    """With K keys more; `mix(p)` sums their values. A logit of -inf is none, and changes nothing."""
    top = jnp.maximum(before.top, logits.max(-1))
    finite = jnp.where(top == -jnp.inf, 0, top)
    p, kept = jnp.exp(logits - finite[..., None]), jnp.exp(before.top - finite)
    return Softmax(top, kept * before.total + p.sum(-1), kept[..., None] * before.mixed + mix(p))


def normalised(found: Softmax) -> Float[Array, "*rows V"]:
    """The sum divided; exactly 0 without a key."""
    return found.mixed / jnp.where(found.total == 0, 1, found.total)[..., None]
