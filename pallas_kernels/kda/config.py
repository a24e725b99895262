"""The static settings of a KDA call, as every backend receives them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a backend is told besides the arrays; part of the compiled program's identity."""

    chunk_size: int = 64  # tokens per chunk: 16, 32, 64, 128 or 256
    checkpoint_every: int = 1  # chunks from one memory kept for the backward pass to the next
    snapshot_every: int | None = None  # tokens between returned memories, a multiple of chunk_size
    erase: bool = True  # False: gated linear attention, S = Diag(exp(g)) S + beta k v^T
    g_min: float | None = None  # promise that every g >= g_min, nats per token; None: any g <= 0
    plain_autodiff: bool = False  # no custom derivative rule, so forward mode works too
