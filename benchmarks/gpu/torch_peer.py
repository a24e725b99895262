"""A PyTorch model of the shape of `mini`: tokens per second of its training step on one GPU.

    python -m benchmarks.gpu.torch_peer --seq-len 8192 --batch-size 32 --rows 2 4

KDA is flash-linear-attention's layer (with K3's gate and full-rank output gate), attention is
PyTorch's `scaled_dot_product_attention` through cuDNN, the routed experts are PyTorch's grouped
matmul, all the rest is compiled by `torch.compile`. Widths, layers, experts, Attention Residuals,
activation and vocabulary are those of k3jax's config: as many parameters, to the last one. Master
weights are float32, products bfloat16, the optimizer is fused AdamW behind gradient clipping.

Left out, all in the peer's favour: documents (a row is one, where k3jax keeps several apart), expert
balancing and its statistics, QK-Clip and its logits, Muon (Newton-Schulz products). Needs torch 2.11,
fla-core and flash-linear-attention 0.6.0. fla tunes its kernels in the first steps, which takes a
minute or more. A JSON line per number of rows.
"""

import argparse
import json
import math
import os
import statistics
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # JAX only reads the configuration here

import torch
import torch.nn.functional as F
from fla.layers import KimiDeltaAttention
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu import gate
from benchmarks.gpu.tuning import compile_candidates_at_once
from k3jax.configs import preset
from k3jax.flops import flops_per_token, peak_flops
from k3jax.model import K3Config

grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm
linear = partial(nn.Linear, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, True) + self.eps).rsqrt() * self.weight).to(x.dtype)


def situ(gate: Tensor, up: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    g, u = gate.float(), up.float()
    capped = gate_cap * torch.tanh(g / gate_cap) * torch.sigmoid(g)
    return (capped * up_cap * torch.tanh(u / up_cap)).to(gate.dtype)


class FeedForward(nn.Module):
    def __init__(self, cfg: K3Config, ffn_dim: int):
        super().__init__()
        self.caps = cfg.activation.gate_cap, cfg.activation.up_cap
        self.gate_up, self.down = linear(cfg.width, 2 * ffn_dim), linear(ffn_dim, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(situ(*self.gate_up(x).chunk(2, -1), *self.caps))


class ToExperts(torch.autograd.Function):
    """Rows sorted by expert from tokens; backward a token's rows are added, without atomics."""

    @staticmethod
    def forward(ctx, z, order, place, active):
        ctx.save_for_backward(place)
        ctx.active = active
        return z[order // active]

    @staticmethod
    def backward(ctx, d):
        (place,) = ctx.saved_tensors
        return d[place].view(-1, ctx.active, d.shape[1]).sum(1), None, None, None


class FromExperts(torch.autograd.Function):
    """Rows in the order of tokens from rows sorted by expert."""

    @staticmethod
    def forward(ctx, rows, order, place):
        ctx.save_for_backward(order)
        return rows[place]

    @staticmethod
    def backward(ctx, d):
        (order,) = ctx.saved_tensors
        return d[order], None, None


class LatentMoE(nn.Module):
    def __init__(self, cfg: K3Config):
        super().__init__()
        moe = cfg.moe
        assert moe is not None
        self.active, self.caps = moe.num_active, (cfg.activation.gate_cap, cfg.activation.up_cap)
        shape = moe.num_experts, moe.latent_dim, 2 * moe.ffn_dim
        self.gate = linear(cfg.width, moe.num_experts)
        self.register_buffer("bias", torch.zeros(moe.num_experts))
        self.into, self.out = linear(cfg.width, shape[1]), linear(shape[1], cfg.width)
        self.w13 = nn.Parameter(torch.empty(shape))
        self.w2 = nn.Parameter(torch.empty(shape[0], moe.ffn_dim, shape[1]))
        self.norm = RMSNorm(shape[1], cfg.norm_eps)
        self.shared = FeedForward(cfg, moe.num_shared * moe.ffn_dim)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(tokens.float(), self.gate.weight))
        ids = (scores.detach() + self.bias).topk(self.active).indices
        p = scores.gather(1, ids)
        p = p / (p.sum(-1, True) + 1e-20)
        experts, order = ids.reshape(-1).sort(stable=True)
        place = torch.empty_like(order).scatter_(
            0, order, torch.arange(order.numel(), device=x.device)
        )
        every = torch.arange(self.w2.shape[0], device=x.device)
        ends = torch.searchsorted(experts, every, right=True).int()
        rows = ToExperts.apply(self.into(tokens), order, place, self.active)
        hidden = grouped_mm(rows, self.w13.to(rows.dtype), offs=ends)
        hidden = situ(*hidden.chunk(2, -1), *self.caps)
        rows = grouped_mm(hidden, self.w2.to(rows.dtype), offs=ends)
        rows = FromExperts.apply(rows, order, place).view(len(tokens), self.active, -1)
        u = (rows.float() * p[..., None]).sum(1).to(x.dtype)
        return (self.out(self.norm(u)) + self.shared(tokens)).view_as(x)


class GatedMLA(nn.Module):
    def __init__(self, cfg: K3Config):
        super().__init__()
        m, width = cfg.mla, cfg.width
        self.cfg = m
        self.q_a, self.q_norm = linear(width, m.q_rank), RMSNorm(m.q_rank, m.latent_norm_eps)
        self.q_b = linear(m.q_rank, m.num_heads * (m.qk_nope_dim + m.qk_shared_dim))
        self.kv_a = linear(width, m.kv_rank + m.qk_shared_dim)
        self.kv_norm = RMSNorm(m.kv_rank, m.latent_norm_eps)
        self.kv_b = linear(m.kv_rank, m.num_heads * (m.qk_nope_dim + m.v_dim))
        self.gate = linear(width, m.num_heads * m.v_dim)
        self.out = linear(m.num_heads * m.v_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        m, (B, T, _) = self.cfg, x.shape
        q = self.q_b(self.q_norm(self.q_a(x))).view(B, T, m.num_heads, -1)
        c, shared = self.kv_a(x).split([m.kv_rank, m.qk_shared_dim], -1)
        k, v = (
            self.kv_b(self.kv_norm(c))
            .view(B, T, m.num_heads, -1)
            .split([m.qk_nope_dim, m.v_dim], -1)
        )
        k = torch.cat([k, shared[:, :, None].expand(B, T, m.num_heads, -1)], -1)
        o = attend(*(a.transpose(1, 2) for a in (q, k, v))).transpose(1, 2).reshape(B, T, -1)
        return self.out(o * torch.sigmoid(self.gate(x).float()).to(o.dtype))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by cuDNN: on an H200 at [2, 8, 8192, 192 and 128] 2.8 ms forward and backward,
    where flash attention, with values widened to 192, takes 6.0 ms and the efficient kernel 26 ms."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mix(nn.Module):
    """An Attention Residuals site with the norm behind it, and the sum in front of it."""

    def __init__(self, cfg: K3Config):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(cfg.width))
        self.norm, self.after = RMSNorm(cfg.width, cfg.norm_eps), RMSNorm(cfg.width, cfg.norm_eps)

    def forward(self, bank: tuple[Tensor, ...], prefix: Tensor | None, y: Tensor):
        prefix = y if prefix is None else prefix + y
        sources = [x.float() for x in (*bank, prefix)]
        scores = [(self.norm(x) * self.query).sum(-1) for x in sources]
        weights = torch.stack(scores, -1).softmax(-1)
        mixed = sum(w[..., None] * x for w, x in zip(weights.unbind(-1), sources, strict=True))
        return self.after(mixed).to(y.dtype), prefix


class Layer(nn.Module):
    def __init__(self, cfg: K3Config, index: int):
        super().__init__()
        attention, mixer = cfg.layers[index]
        self.pushes = index % cfg.attn_res.block_size == 0
        self.before, self.between = Mix(cfg), Mix(cfg)
        self.kda = attention == "kda"
        if self.kda:
            heads, dim = cfg.kda.num_heads, cfg.kda.head_dim
            self.attention = KimiDeltaAttention(
                cfg.width, head_dim=dim, num_heads=heads, safe_gate=True,
                lower_bound=cfg.kda.g_min, conv_size=cfg.kda.conv_size, norm_eps=cfg.kda.norm_eps,
            )  # fmt: skip
            self.attention.g_proj = linear(cfg.width, heads * dim)
        else:
            self.attention = GatedMLA(cfg)
        self.mixer = LatentMoE(cfg) if mixer == "moe" else FeedForward(cfg, cfg.dense_ffn_dim)

    def forward(self, bank: tuple[Tensor, ...], prefix: Tensor | None, y: Tensor):
        """`y`, the output of the sub-layer before, is not yet in `prefix`."""
        x, prefix = self.before(bank, prefix, y)
        if self.pushes:
            bank, prefix = (*bank, prefix), None
        y = self.attention(x)[0] if self.kda else self.attention(x)
        x, prefix = self.between(bank, prefix, y)
        return bank, prefix, self.mixer(x)


def cross_entropy(h: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    logits = F.linear(h, head)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    def __init__(self, cfg: K3Config, recompute: bool):
        super().__init__()
        self.recompute, self.loss = recompute, cross_entropy
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.width)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_layers))
        self.last = Mix(cfg)
        self.head = linear(cfg.width, cfg.vocab_size)
        for name, weight in self.named_parameters():
            if weight.ndim > 1 and "conv1d" not in name:
                nn.init.normal_(weight, std=cfg.init_std)

    def compile(self) -> None:
        """Compiles all but KDA, whose kernels are fla's."""
        self.loss = torch.compile(cross_entropy)
        for module in self.modules():
            if isinstance(module, Mix | LatentMoE | GatedMLA | FeedForward):
                module.forward = torch.compile(module.forward, dynamic=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        bank, prefix, y = (), None, self.embedding(tokens).bfloat16()
        for layer in self.layers:
            if self.recompute:
                bank, prefix, y = checkpoint(layer, bank, prefix, y, use_reentrant=False)
            else:
                bank, prefix, y = layer(bank, prefix, y)
        h, _ = self.last(bank, prefix, y)
        return self.loss(h, self.head.weight, targets)


def measure(cfg: K3Config, model: Model, args: argparse.Namespace, rows: int) -> dict:
    """Figures of whole steps, `rows` rows per forward and backward pass."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    passes = args.batch_size // rows
    shape = passes, rows, args.seq_len + 1
    tokens = torch.randint(cfg.vocab_size, shape, device="cuda")

    def step(tokens: Tensor = tokens) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin, total = time.perf_counter(), 0.0
        for some in tokens:
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(some[:, :-1], some[:, 1:]) / passes
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = float(total)
        return time.perf_counter() - begin, total

    print(f"tuned and compiled after {step(tokens[:1])[0]:.1f} s", flush=True)
    torch.cuda.empty_cache()
    gate.wait()
    print(f"warm-up: {step()[0]:.1f} s", flush=True)
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = zip(*(step() for _ in range(args.timed)), strict=True)
    median = statistics.median(seconds)
    rate = args.batch_size * args.seq_len / median
    name = torch.cuda.get_device_name()
    return {
        "what": "torch peer of mini", "device": name, "torch": torch.__version__,
        "parameters": sum(x.numel() for x in model.parameters()),
        "seq_len": args.seq_len, "batch_size": args.batch_size, "rows": rows,
        "recompute": args.recompute, "compiled": not args.eager, "losses": losses,
        "seconds": median, "spread": max(seconds) - min(seconds), "tokens_per_second": round(rate),
        "mfu": round(rate * flops_per_token(cfg, args.seq_len) / (peak_flops(name) or math.nan), 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }  # fmt: skip


def build(args: argparse.Namespace) -> tuple[K3Config, Model]:
    """The model on the GPU, with everything but KDA to be compiled."""
    cfg = preset("mini")().model
    torch.manual_seed(0)
    torch._dynamo.config.cache_size_limit = 64  # mixes of one to six sources
    compile_candidates_at_once()
    with torch.device("cuda"):
        model = Model(cfg, args.recompute)
    if not args.eager:
        model.compile()
    return cfg, model


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of one step")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[2], help="of one pass; several: each"
    )
    parser.add_argument("--recompute", action="store_true", help="layers in the backward pass")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--timed", type=int, default=5, help="steps whose median counts")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    cfg, model = build(args)
    for rows in args.rows:
        print(json.dumps(measure(cfg, model, args, rows)), flush=True)


if __name__ == "__main__":
    main()
