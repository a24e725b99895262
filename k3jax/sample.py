"""Generation: prefill the prompt, then one-token steps over the hybrid cache inside one compiled loop."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from k3jax.data.tokenizer import Tokenizer
from k3jax.model import K3Config, init_decode_state
from k3jax.train_state import abstract_model

BLOCK = 16  # tokens per call of the compiled loop, and so per flush to the terminal
MIN_BUCKET = (
    64  # shortest cache; prompts and caches round up to powers of two, one compilation each
)


class SamplingConfig(NamedTuple):
    temperature: float = 0.8  # 0: always the likeliest token
    top_k: int = 0  # choose among this many likeliest tokens; 0: all
    top_p: float = 1.0  # and among the fewest whose probabilities reach this sum

    def check(self) -> None:
        """Raises ValueError for values outside their range."""
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0 and finite")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")


def sample_token(
    key: Array,
    logits: Float[Array, "B X"],
    temperature: Float[Array, ""],
    top_k: int,
    top_p: Float[Array, ""],
) -> Int[Array, " B"]:
    """One token per row from the tempered, truncated distribution.

    Args:
        key: PRNG key.
        logits: float32; -inf excludes a token.
        temperature: divides the logits; 0 takes the likeliest token, the lowest id among equals.
        top_k: keep this many tokens; 0 keeps all.
        top_p: keep the shortest run of likeliest tokens whose probabilities sum to at least this.
    """
    values, ids = jax.lax.top_k(logits, top_k if 0 < top_k < logits.shape[-1] else logits.shape[-1])
    scaled = values / jnp.where(temperature > 0, temperature, 1)
    before = jnp.cumsum(jax.nn.softmax(scaled), -1) - jax.nn.softmax(scaled)
    rank = jax.random.categorical(key, jnp.where(before < top_p, scaled, -jnp.inf))
    rank = jnp.where(temperature > 0, rank, 0)
    return jnp.take_along_axis(ids, rank[:, None], -1)[:, 0].astype(jnp.int32)


def bucket(length: int) -> int:
    """Smallest power of two that holds `length` tokens, at least MIN_BUCKET."""
    return max(MIN_BUCKET, 1 << max(length - 1, 0).bit_length())


class Generator:
    """A model with its compiled prefill and decode loop; reuse it for many prompts.

    Args:
        cfg: model config.
        params, buffers: pure dicts.
        tokenizer: decides which ids may be generated; its `eos_id` ends a row.
        sampling: temperature and truncation.
    """

    def __init__(
        self,
        cfg: K3Config,
        params: Any,
        buffers: Any,
        tokenizer: Tokenizer,
        sampling: SamplingConfig | None = None,
    ):
        sampling = sampling or SamplingConfig()
        sampling.check()
        if tokenizer.size > cfg.vocab_size:
            raise ValueError(
                f"tokenizer has {tokenizer.size} ids, model.vocab_size is {cfg.vocab_size}: use the run's own tokenizer"
            )
        self.cfg, self.tokenizer, self.sampling = cfg, tokenizer, sampling
        self.weights = (params, buffers)
        self.graphdef, _, _ = abstract_model(cfg)
        allowed = np.zeros(cfg.vocab_size, bool)
        allowed[: tokenizer.size] = True
        allowed[[tokenizer.bos_id, tokenizer.pad_id]] = False
        self.allowed = jnp.asarray(allowed)
        self._prefill = jax.jit(self._prefill_fn)
        self._decode = jax.jit(self._decode_fn, donate_argnums=(1,))

    def _logits(self, weights, tokens, segment_ids, state):
        model = nnx.merge(self.graphdef, *weights)
        h, _, state = model.hidden(tokens, segment_ids=segment_ids, state=state)
        return model, h, state

    def _prefill_fn(self, weights, tokens, lengths, state):
        """Consume right-padded prompts; logits after each row's last token."""
        segment_ids = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
        model, h, state = self._logits(weights, tokens, segment_ids, state)
        last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], 1)
        return self._mask(model.logits(last)[:, 0]), state

    def _mask(self, logits):
        return jnp.where(self.allowed, logits, -jnp.inf)

    def _decode_fn(self, weights, carry, key, temperature, top_p, limit):
        """Up to BLOCK one-token steps; stops when all rows are done or `limit` tokens are out."""
        eos, pad = self.tokenizer.eos_id, self.tokenizer.pad_id

        def running(loop):
            i, _, (_, _, done, count) = loop
            return (i < BLOCK) & (count < limit) & ~done.all()

        def step(loop):
            i, out, (state, logits, done, count) = loop
            token = sample_token(
                jax.random.fold_in(key, count), logits, temperature, self.sampling.top_k, top_p
            )
            token = jnp.where(done, pad, token)
            done = done | (token == eos)
            out = out.at[:, i].set(token)
            model, h, state = self._logits(weights, token[:, None], None, state)
            return i + 1, out, (state, self._mask(model.logits(h)[:, 0]), done, count + 1)

        batch = carry[1].shape[0]
        start = (jnp.int32(0), jnp.full((batch, BLOCK), pad, jnp.int32), carry)
        i, out, carry = jax.lax.while_loop(running, step, start)
        return out, i, carry

    def stream(
        self, prompts: list[list[int]], max_tokens: int, seed: int = 0
    ) -> Iterator[list[list[int]]]:
        """New tokens of every row, block by block; a row ends with the end-of-document id.

        Args:
            prompts: token ids, at least one per row.
            max_tokens: per row.
            seed: of the draws; the same seed, prompts and model give the same tokens.
        """
        if not prompts or not all(prompts):
            raise ValueError("every prompt needs at least one token")
        lengths = [len(p) for p in prompts]
        width = bucket(max(lengths))
        tokens = np.full((len(prompts), width), self.tokenizer.pad_id, np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        if tokens.max() >= self.cfg.vocab_size or tokens.min() < 0:
            raise ValueError(
                f"prompt holds token {tokens.max()}, model.vocab_size is {self.cfg.vocab_size}"
            )
        state = init_decode_state(self.cfg, len(prompts), bucket(max(lengths) + max_tokens))
        logits, state = self._prefill(self.weights, tokens, jnp.asarray(lengths, jnp.int32), state)
        carry = (state, logits, jnp.zeros(len(prompts), bool), jnp.int32(0))
        temperature, top_p = (
            jnp.float32(self.sampling.temperature),
            jnp.float32(self.sampling.top_p),
        )
        produced = 0
        while produced < max_tokens:
            out, n, carry = self._decode(
                self.weights, carry, jax.random.key(seed), temperature, top_p, jnp.int32(max_tokens)
            )
            n = int(n)
            yield [self._cut(row[:n]) for row in np.asarray(out).tolist()]
            produced += n
            if n < BLOCK or bool(carry[2].all()):
                return

    def _cut(self, row: list[int]) -> list[int]:
        eos = self.tokenizer.eos_id
        row = row[: row.index(eos) + 1] if eos in row else row
        return [token for token in row if token != self.tokenizer.pad_id]

    def generate(self, prompts: list[list[int]], max_tokens: int, seed: int = 0) -> list[list[int]]:
        """All new tokens of every row; see `stream`."""
        rows: list[list[int]] = [[] for _ in prompts]
        for blocks in self.stream(prompts, max_tokens, seed):
            for row, block in zip(rows, blocks, strict=True):
                row.extend(block)
        return rows

    def stream_text(self, prompt: str, max_tokens: int, seed: int = 0) -> Iterator[str]:
        """Continuation of one text, in pieces of whole characters; arguments as in `stream`."""
        decoder = self.tokenizer.stream()
        tokens = [self.tokenizer.bos_id, *self.tokenizer.encode(prompt)]
        for (block,) in self.stream([tokens], max_tokens, seed):
            yield "".join(decoder.push(token) for token in block if token != self.tokenizer.eos_id)
        yield decoder.flush()
