"""Decode state of the hybrid model: conv inputs and memory for KDA, pages of latents for MLA, one length per row."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int

from k3jax.layers.kda import KDACache, KDAConfig
from k3jax.layers.mla import MLACache, MLAConfig
from k3jax.sharding.mesh import ROWS
from k3jax.stacks import Schedule, plan_stacks

Cache = KDACache | MLACache


class DecodeState(NamedTuple):
    """Everything needed to continue a batch of sequences.

    length: tokens consumed so far by each row, int32.
    caches: stack -> layer -> cache, as the parameters lie, with their leading axis. KDA's are of the
        rows, MLA's are pages that the rows share.
    page_table: pages of each row in order, the same in every MLA layer; None: row b has page b
        alone. What lies behind a row's length is not looked at.
    """

    length: Int[Array, " B"]
    caches: dict[str, dict[str, Cache]]
    page_table: Int[Array, "B M"] | None = None


def take_repetition(
    caches: dict[str, Cache], state: DecodeState, index: Int[Array, ""]
) -> tuple[dict[str, Cache], Int[Array, "B M"]]:
    """The caches of one repetition of a stack, and the page table for them.

    MLA's pages stay together: a layer gets those of all repetitions, and a table that points to its
    own. So no layer's pages are copied for the sake of the few rows that it reads and writes.
    """
    table, mine = state.page_table, {}
    if table is None:
        table = jnp.arange(state.length.shape[0], dtype=jnp.int32)[:, None]
    first = jnp.int32(0)  # page of this repetition, in every MLA layer of the stack
    for name, cache in caches.items():
        if isinstance(cache, MLACache):
            repeats, pages = cache.latent.shape[:2]
            mine[name] = MLACache(cache.latent.reshape(repeats * pages, *cache.latent.shape[2:]))
            first = index * pages
        else:
            mine[name] = jax.tree.map(lambda x: _at(x, index), cache)
    return mine, table + first


def put_repetition(
    caches: dict[str, Cache], mine: dict[str, Cache], index: Int[Array, ""]
) -> dict[str, Cache]:
    """The caches of a stack with those of one repetition replaced."""

    def put(cache, new):
        if isinstance(cache, MLACache):
            return MLACache(new.latent.reshape(cache.latent.shape))
        return jax.tree.map(
            lambda x, one: jax.lax.dynamic_update_index_in_dim(x, one, index, 0), cache, new
        )

    return {name: put(cache, mine[name]) for name, cache in caches.items()}


def _at(x: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)


def take_row(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """One row as a batch of its own, which shares the pages; the slot may be traced (KF-037).

    A row without computed tokens reads as zeros, whatever its slot held before (KF-032).
    """
    length = jax.lax.dynamic_slice_in_dim(state.length, slot, 1)

    def take(x):
        x = jax.lax.dynamic_slice_in_dim(x, slot, 1, axis=1)
        return jnp.where(length[0] > 0, x, jnp.zeros_like(x))

    table = state.page_table
    if table is not None:
        table = jax.lax.dynamic_slice_in_dim(table, slot, 1)
    return DecodeState(length, _of_rows(take, state.caches), table)


def put_row(state: DecodeState, slot: Int[Array, ""], row: DecodeState) -> DecodeState:
    """The state with a row of it replaced, and its pages."""

    def put(x, new):
        return jax.lax.dynamic_update_slice_in_dim(x, new, slot, axis=1)

    length = jax.lax.dynamic_update_slice_in_dim(state.length, row.length, slot, 0)
    caches = _of_rows(put, state.caches, row.caches)
    return DecodeState(length, caches, state.page_table)


def kda_caches(state: DecodeState) -> dict[str, dict[str, KDACache]]:
    """What a row has beside its pages: of `take_row`, a snapshot once it is copied."""
    return {
        stack: {name: c for name, c in layers.items() if isinstance(c, KDACache)}
        for stack, layers in state.caches.items()
    }


def _of_rows(change, caches, *others):
    """`change` on every array of KDA's caches; pages are those of the last tree."""

    def one(cache, *rest):
        if isinstance(cache, MLACache):
            return (cache, *rest)[-1]
        return jax.tree.map(change, cache, *rest)

    return jax.tree.map(one, caches, *others, is_leaf=lambda x: isinstance(x, Cache))


class DecodeConfig(Schedule, Protocol):
    """What `k3jax.model.K3Config` says of what its layers carry from token to token."""

    @property
    def kda(self) -> KDAConfig: ...
    @property
    def mla(self) -> MLAConfig: ...
    @property
    def dtype(self) -> str: ...


def init_decode_state(
    cfg: DecodeConfig, batch: int, max_len: int, *, pages: int | None = None, page_tokens: int = 64
) -> DecodeState:
    """Empty state: `batch` rows with room for `max_len` tokens in each MLA cache.

    Without `pages` every row has one page, of its whole length. With them that many pages of
    `page_tokens` tokens are there for all rows; the page table, zeros, is for the caller to fill.
    """
    rows, size, page_table = batch, max_len, None
    if pages is not None:
        rows, size = pages, page_tokens
        page_table = jnp.zeros((batch, -(-max_len // page_tokens)), jnp.int32)
    caches: dict[str, dict[str, Cache]] = {}
    for plan in plan_stacks(cfg):
        caches[plan.name] = {}
        for j in range(plan.size):
            attention = cfg.layers[plan.first + j][0]
            held = (rows, size) if attention == "mla" else (batch, max_len)
            one = getattr(cfg, attention).init_cache(*held, jnp.dtype(cfg.dtype))
            caches[plan.name][f"layer_{j}"] = jax.tree.map(
                lambda x, n=plan.repeats: jnp.zeros((n, *x.shape), x.dtype), one
            )
    return DecodeState(jnp.zeros((batch,), jnp.int32), caches, page_table)


def decode_state_specs(
    cfg: DecodeConfig, sizes: Mapping[str, int], *, rows: Any = ROWS, paged: bool = False
) -> Any:
    """PartitionSpecs of `init_decode_state` on a mesh: rows as a batch's, the heads of KDA over `tensor`.

    `rows` None: every device has all rows. `paged`: with a page table, which goes with all rows. An MLA cache holds what all heads share, so every `tensor` device has it whole. Tokens are never
    split: decoding knows no `context`.
    """
    heads = "tensor" if sizes["tensor"] > 1 else None

    spec: Any = PartitionSpec  # in the place of arrays
    of: dict[str, Any] = {
        "mla": MLACache(spec(None, rows)),
        "kda": KDACache(spec(None, rows, None, None, heads), spec(None, rows, heads)),
    }
    caches = {
        plan.name: {f"layer_{j}": of[cfg.layers[plan.first + j][0]] for j in range(plan.size)}
        for plan in plan_stacks(cfg)
    }
    return DecodeState(spec(rows), caches, spec(rows) if paged else None)


def state_bytes(state: DecodeState) -> int:
    """Bytes held by a state, real or abstract."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def compact_rows(
    tokens: Int[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"]]:
    """Move each row's real tokens to the front, in order; padding goes to the right.

    Returns: tokens, segment ids (1 real, 0 padding), and for each slot the column that it came from.
    """
    order = jnp.argsort(~mask, axis=1, stable=True)
    take = jax.vmap(lambda row, idx: row[idx])
    return take(tokens, order), take(mask.astype(jnp.int32), order), order
