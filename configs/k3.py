"""The released models: Kimi K3 and Kimi Linear 48B. Sources are named beside the numbers.

[config] the released config.json; [report] the K3 technical report; [K2] the Kimi K2 report; undisclosed: our choice.
"""

from dataclasses import replace

from k3jax.configs.experiment import ExperimentConfig
from k3jax.layers.attention_residuals import AttnResConfig
from k3jax.layers.feed_forward import ActivationConfig
from k3jax.layers.kda import KDAConfig
from k3jax.layers.latent_moe import LatentMoEConfig
from k3jax.layers.mla import MLAConfig
from k3jax.model import K3Config
from k3jax.optim.build import OptimConfig


def kimi_k3_model() -> K3Config:
    """Text model of Kimi K3: 2.78 T parameters, 104 B active [config]."""
    return K3Config(
        vocab_size=163_840,
        width=7168,
        num_layers=93,
        pattern=("kda", "kda", "kda", "mla"),
        closing=("mla",),
        num_dense_layers=1,
        dense_ffn_dim=33_792,
        kda=KDAConfig(
            num_heads=96,
            head_dim=128,
            conv_size=4,
            gate="bounded",
            g_min=-5.0,
            gate_rank=128,
            out_gate_rank=None,
            beta_max=1.0,
            norm_eps=1e-5,
            chunk_size=64,
            backend=None,
        ),
        mla=MLAConfig(
            num_heads=96,
            q_rank=1536,
            kv_rank=512,
            qk_nope_dim=128,
            qk_shared_dim=64,
            v_dim=128,
            out_gate=True,
            latent_norm_eps=1e-6,  # class default of the reference, not rms_norm_eps
            rope_theta=None,
        ),
        moe=LatentMoEConfig(
            num_experts=896,
            num_active=16,
            ffn_dim=3072,
            latent_dim=3584,
            latent_norm=True,
            num_shared=2,
            router="sigmoid",
            renormalize=True,
            routed_scale=1.0,
            num_groups=1,
            num_active_groups=1,
            balancing="quantile_histogram",  # [report, 2.3.3]
            num_bins=1000,  # [report, App. D]
            weights="plain",
        ),
        activation=ActivationConfig(kind="situ", gate_cap=4.0, up_cap=25.0),
        attn_res=AttnResConfig(kind="block", block_size=12),
        norm_eps=1e-5,
        init_std=0.02,
        tie_embeddings=False,
        dtype="bfloat16",
        param_dtype="float32",  # fp32 master weights; undisclosed
        remat="full",
        scan_layers=True,
    )


def kimi_k3() -> ExperimentConfig:
    """Pre-training of Kimi K3 at its first context length; batch, length and rates are undisclosed (here: from [K2])."""
    return ExperimentConfig(
        name="kimi_k3",
        model=kimi_k3_model(),
        steps=500_000,  # undisclosed
        batch_size=8192,  # 67 M tokens [K2]
        seq_len=8192,  # first stage [report, 3.4]
        checkpoint_every=500,
        eval_every=500,
        optim=OptimConfig(peak_lr=2e-4, final_lr=2e-5),  # [K2]
    )


def kimi_linear_48b_model() -> K3Config:
    """Text model of Kimi Linear 48B-A3B, the predecessor: softplus gate, SwiGLU, plain residuals [its config]."""
    k3 = kimi_k3_model()
    assert k3.moe is not None
    return replace(
        k3,
        width=2304,
        num_layers=27,
        closing=("kda", "kda", "mla"),
        dense_ffn_dim=9216,
        kda=replace(k3.kda, num_heads=32, gate="softplus", g_min=None, out_gate_rank=128),
        mla=replace(k3.mla, num_heads=32, q_rank=None, out_gate=False),
        moe=replace(
            k3.moe,
            num_experts=256,
            num_active=8,
            ffn_dim=1024,
            latent_dim=None,
            latent_norm=False,
            num_shared=1,
            routed_scale=2.446,
        ),
        activation=ActivationConfig(kind="swiglu", gate_cap=None, up_cap=None),
        attn_res=AttnResConfig(kind="none", block_size=None),
    )


def kimi_linear_48b() -> ExperimentConfig:
    """Kimi Linear 48B-A3B with the training recipe of `kimi_k3`."""
    return replace(
        kimi_k3(), name="kimi_linear_48b", model=kimi_linear_48b_model(), batch_size=2048
    )
