"""Small Kimi K3s with every mechanism of the large one; sizes for one accelerator, for Colab, for a CPU."""

from dataclasses import replace

from k3jax.configs.experiment import ExperimentConfig
from k3jax.configs.k3 import kimi_k3_model
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.model import K3Config, Remat
from k3jax.optim.build import OptimConfig


def _scaled(
    *,
    vocab_size: int,
    width: int,
    num_layers: int,
    block_size: int,
    dense_ffn_dim: int,
    heads: int,
    head_dim: int,
    q_rank: int,
    kv_rank: int,
    shared_dim: int,
    experts: int,
    active: int,
    ffn_dim: int,
    latent_dim: int,
    num_bins: int = 1000,
    chunk_size: int = 64,
    dtype: str,
    remat: Remat,
) -> K3Config:
    """Kimi K3 with other sizes and the same mechanisms."""
    k3 = kimi_k3_model()
    assert k3.moe is not None
    return replace(
        k3,
        vocab_size=vocab_size,
        width=width,
        num_layers=num_layers,
        dense_ffn_dim=dense_ffn_dim,
        kda=replace(
            k3.kda, num_heads=heads, head_dim=head_dim, gate_rank=head_dim, chunk_size=chunk_size
        ),
        mla=replace(
            k3.mla,
            num_heads=heads,
            q_rank=q_rank,
            kv_rank=kv_rank,
            qk_nope_dim=head_dim,
            qk_shared_dim=shared_dim,
            v_dim=head_dim,
        ),
        moe=replace(
            k3.moe,
            num_experts=experts,
            num_active=active,
            ffn_dim=ffn_dim,
            latent_dim=latent_dim,
            num_bins=num_bins,
        ),
        attn_res=AttnResConfig(kind="block", block_size=block_size),
        dtype=dtype,
        remat=remat,
    )


def mini() -> ExperimentConfig:
    """1.3 B parameters: one large accelerator (80 GB and more)."""
    return ExperimentConfig(
        name="mini",
        model=_scaled(
            vocab_size=32_768,
            width=1024,
            num_layers=21,
            block_size=6,
            dense_ffn_dim=4096,
            heads=8,
            head_dim=128,
            q_rank=384,
            kv_rank=256,
            shared_dim=64,
            experts=64,
            active=8,
            ffn_dim=512,
            latent_dim=512,
            dtype="bfloat16",
            remat="full",
        ),  # fmt: skip
        steps=20_000,
        batch_size=64,
        seq_len=4096,
        accumulation=4,
        checkpoint_every=500,
        eval_every=500,
        optim=OptimConfig(peak_lr=5e-4, final_lr=5e-5),
    )


def colab() -> ExperimentConfig:
    """About 120 M parameters: one Colab-class accelerator (16 GB)."""
    return ExperimentConfig(
        name="colab",
        model=_scaled(
            vocab_size=512,
            width=512,
            num_layers=13,
            block_size=6,
            dense_ffn_dim=2048,
            heads=8,
            head_dim=64,
            q_rank=192,
            kv_rank=128,
            shared_dim=32,
            experts=32,
            active=4,
            ffn_dim=320,
            latent_dim=256,
            dtype="bfloat16",
            remat="full",
        ),  # fmt: skip
        steps=2000,
        batch_size=32,
        seq_len=1024,
        checkpoint_every=250,
        eval_every=250,
        optim=OptimConfig(peak_lr=1e-3, final_lr=1e-4),
    )


def nano() -> ExperimentConfig:
    """A few million parameters: a CPU, in minutes."""
    return ExperimentConfig(
        name="nano",
        model=_scaled(
            vocab_size=272,
            width=128,
            num_layers=5,
            block_size=2,
            dense_ffn_dim=384,
            heads=4,
            head_dim=32,
            q_rank=64,
            kv_rank=48,
            shared_dim=16,
            experts=16,
            active=4,
            ffn_dim=128,
            latent_dim=64,
            num_bins=256,
            chunk_size=16,
            dtype="float32",
            remat="none",
        ),  # fmt: skip
        steps=200,
        batch_size=8,
        seq_len=256,
        checkpoint_every=50,
        eval_every=100,
        eval_batches=16,
        optim=OptimConfig(peak_lr=4e-3, final_lr=4e-4, ns_dtype="float32"),
    )
