"""What `kda` refuses: settings, shapes and, when asked, values that it cannot mean anything by."""

import math

import jax
import numpy as np

from k3jax.pallas_kernels.kda.config import Config

CHUNK_SIZES = (16, 32, 64, 128, 256)


def make_config(
    chunk_size, checkpoint_every, snapshot_every, erase, g_min, plain_autodiff
) -> Config:
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"chunk_size is {chunk_size}; choose 16, 32, 64, 128 or 256")
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every is {checkpoint_every}; keep one memory in 1 or more")
    if snapshot_every is not None:
        if snapshot_every < 16 or snapshot_every % 16:
            raise ValueError(f"snapshot_every is {snapshot_every}; choose a multiple of 16 tokens")
        chunk_size = max(c for c in CHUNK_SIZES if c <= chunk_size and snapshot_every % c == 0)
    if g_min is not None and not -math.inf < g_min < 0:
        raise ValueError(f"g_min must be negative and finite, got {g_min}; K3 uses -5.0")
    return Config(
        chunk_size=chunk_size,
        checkpoint_every=checkpoint_every,
        snapshot_every=snapshot_every,
        erase=erase,
        g_min=g_min,
        plain_autodiff=plain_autodiff,
    )


def check_shapes(q, k, v, beta, state, segment_ids, cu_seqlens, snapshot_every, extra) -> None:
    """`extra` holds the arguments of one entry point only: name -> (array, expected shape)."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    if HV % H:
        raise ValueError(f"v has {HV} heads, which is not a multiple of the {H} heads of q and k")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("give segment_ids or cu_seqlens, not both")
    if cu_seqlens is not None and B != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, but q has {B} rows")
    if cu_seqlens is not None and cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens is empty; it starts with offset 0")
    if cu_seqlens is not None and snapshot_every is not None:
        raise ValueError(
            f"snapshot_every={snapshot_every} counts the tokens of rows; with cu_seqlens call the "
            "documents as rows of their own"
        )
    rows = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = {
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, HV, V)),
        "beta": (beta, (B, T, HV)),
        "state": (state, (rows, HV, K, V)),
        "segment_ids": (segment_ids, (B, T)),
        **extra,
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape} with q {q.shape}")


def validate_values(values, segment_ids, cu_seqlens, *, beta_max, g_min=None) -> None:
    """Checks arrays by name: at once, or when the program runs if they are being traced."""
    check = _Validate(beta_max, g_min)
    if any(isinstance(x, jax.core.Tracer) for x in values.values()):
        jax.debug.callback(check, values, segment_ids, cu_seqlens)
    else:
        check(values, segment_ids, cu_seqlens)


class _Validate:
    """Host-side value checks; padding may hold anything, so only real tokens are looked at."""

    def __init__(self, beta_max: float, g_min: float | None):
        self.beta_max, self.g_min = beta_max, g_min

    def __call__(self, values, segment_ids, cu_seqlens) -> None:
        values = {name: np.asarray(x, np.float32) for name, x in values.items() if x is not None}
        if cu_seqlens is not None:
            offsets, T = np.asarray(cu_seqlens), values["q"].shape[1]
            if offsets[0] != 0 or offsets[-1] != T or (np.diff(offsets) < 0).any():
                raise ValueError(f"cu_seqlens must rise from 0 to T = {T}, got {offsets.tolist()}")
        if segment_ids is not None:
            ids = np.asarray(segment_ids)
            if (ids < 0).any():
                raise ValueError(f"segment_ids must be >= 0 (0 is padding), got {ids.min()}")
            for row, real in enumerate(ids > 0):
                runs = ids[row][real]
                runs = runs[np.diff(runs, prepend=0) != 0]
                if len(set(runs.tolist())) < len(runs):
                    raise ValueError(
                        f"segment_ids of row {row} are not contiguous: documents {runs.tolist()}"
                    )
            values = {name: x[ids > 0] for name, x in values.items()}
        for name, x in values.items():
            if not np.isfinite(x).all():
                raise ValueError(f"{name} must be finite, found {x[~np.isfinite(x)][0]}")
        beta = values["beta"]
        if beta.size and not (beta.min() >= 0 and beta.max() <= self.beta_max):
            raise ValueError(
                f"beta must lie in [0, {self.beta_max}], found {beta.min():.6g} to {beta.max():.6g}"
            )
        if "z" in values:  # raw projections may have any value
            return
        g, k = values.get("g"), values["k"]
        if g is not None and g.size and g.max() > 0:
            raise ValueError(
                f"g must be a natural-log decay <= 0 (nats per token), the largest is {g.max():.6g}"
            )
        if g is not None and g.size and self.g_min is not None and g.min() < self.g_min:
            raise ValueError(
                f"g_min={self.g_min} promises g >= g_min, the smallest is {g.min():.6g}; pass the "
                "true bound, or None"
            )
        if k.size and (longest := np.sqrt((k * k).sum(-1)).max()) > 1.02:
            raise ValueError(f"k must be L2-normalised, the longest key has norm {longest:.6g}")
