"""What the GPU kernels of KDA have in common: sums of log-decays, products.

A chunk is two tiles of 16 tokens. Since g >= -5, a tile loses at most 116 bits, so there both
factors of exp2(N_i - N_j) = exp2(N_i + 60) exp2(-N_j - 60) fit float32 and bfloat16, where N is the
sum of g / ln 2 from the start of the tile, or of the document that begins in it. README.md has the
derivation.
"""

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(32)
TILE: tl.constexpr = tl.constexpr(16)
SHIFT: tl.constexpr = tl.constexpr(60.0)  # bits that centre the range of a tile's factors
EPS: tl.constexpr = tl.constexpr(1e-6)
BF16: tl.constexpr = tl.constexpr(tl.bfloat16)


@triton.jit
def dot(a, b):
    """A product in float32 of operands in bfloat16 or float32, nothing rounded but the sums."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_dot(a, b, c):
    """c + a b, likewise."""
    return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def split(x):
    """A float32 number as two of bfloat16, 16 bits of it."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def fine_dot(a, b, DTYPE: tl.constexpr):
    """A product of float32 operands: to 16 bits where kernels run in bfloat16, else exact."""
    if BF16 == DTYPE:
        a_high, a_low = split(a)
        b_high, b_low = split(b)
        return add_dot(a_high, b_high, add_dot(a_high, b_low, dot(a_low, b_high)))
    else:
        return dot(a, b)


@triton.jit
def fine_sum(x, ones, DTYPE: tl.constexpr):
    """x @ ones for a matrix of zeros and ones, of 16 bits of x, or of all."""
    if BF16 == DTYPE:
        high, low = split(x)
        ones = ones.to(tl.float32).to(tl.bfloat16)
        return add_dot(high, ones, dot(low, ones))
    else:
        return dot(x, ones.to(tl.float32))


@triton.jit
def channel_sums(g, earlier, DTYPE: tl.constexpr):
    """Sums of g, [K, 32], over the tokens that `earlier` marks, [32, 32] of (token, summand)."""
    ones = tl.trans(earlier.to(tl.float32))
    if BF16 == DTYPE:  # all 24 bits
        ones = ones.to(tl.bfloat16)
        high, low = split(g)
        lowest = (g - high.to(tl.float32) - low.to(tl.float32)).to(tl.bfloat16)
        return add_dot(high, ones, add_dot(low, ones, dot(lowest, ones)))
    else:
        return dot(g, ones)


@triton.jit
def _restarting(sum_a, starts_a, sum_b, starts_b):
    return tl.where(starts_b > 0, sum_b, sum_a + sum_b), starts_a | starts_b


@triton.jit
def token_sums(g, earlier, DTYPE: tl.constexpr):
    """The same of g [32, K]; in bfloat16 by a scan, which keeps tokens and channels where they are."""
    if BF16 == DTYPE:
        starts = tl.sum(earlier.to(tl.int32), 1) == 1  # a token that sees itself alone
        starts = tl.broadcast_to(starts.to(tl.int32)[:, None], g.shape)
        return tl.associative_scan((g, starts), 0, _restarting)[0]
    else:
        return dot(earlier.to(tl.float32), g)


@triton.jit
def read_marks(marks, token):
    """Whether tokens are real, and which of the chunk's documents they belong to; also the last.

    A mark is the number of documents that begin in the chunk up to the token, n, or -1 - n at
    padding.
    """
    mark = tl.load(marks + token)
    document = tl.maximum(mark, -1 - mark)
    return mark >= 0, document, tl.max(document, 0)


@triton.jit
def tokens_seen(document, MASKED: tl.constexpr):
    """Of pairs of tokens, [32, 32]: whether the first sees the second, and whether both are of one tile."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    seen = i >= j
    if MASKED:
        seen = seen & (document[:, None] == document[None, :])
    return seen, seen & (i // TILE == j // TILE)


@triton.jit
def unit_factor(x, scale, NORM: tl.constexpr):
    """scale / |x| of vectors [32, K]; 1 where they are given ready."""
    if NORM:
        x = x.to(tl.float32)
        return tl.rsqrt(tl.sum(x * x, 1) + EPS) * scale
    else:
        return tl.full((CHUNK,), 1.0, tl.float32)


@triton.jit
def norm_factor(x, token, h, H, scale, K: tl.constexpr, NORM: tl.constexpr):
    """scale / |x| of the chunk's vectors, x [tokens, H, K]; 1 where they are given ready."""
    if NORM:
        at = (token * H + h)[None, :] * K + tl.arange(0, K)[:, None]
        x_i = tl.load(x + at).to(tl.float32)
        return tl.rsqrt(tl.sum(x_i * x_i, 0) + EPS) * scale
    else:
        return tl.full((CHUNK,), 1.0, tl.float32)


@triton.jit
def log2_decay(z, gate, channel, G_MIN2: tl.constexpr, HK, GATED: tl.constexpr):
    """g / ln 2: of logits G_MIN2 / (1 + exp2(slope z + offset)), or as it is given in nats.

    Also the sigmoid. `channel` are the channels of all heads, with an axis for the tokens.
    """
    if GATED:
        slope, offset = tl.load(gate + channel), tl.load(gate + HK + channel)
        sigmoid = 1.0 / (1.0 + tl.exp2(slope * z + offset))
        return G_MIN2 * sigmoid, sigmoid
    else:
        return z * 1.4426950408889634, z
