"""KDA while decoding: one token per request, or a short window of which a part is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from k3jax.pallas_kernels import dispatch
from k3jax.pallas_kernels import slots as pools
from k3jax.pallas_kernels.kda import gpu_decode

MAX_WINDOW = 17  # tokens: 8 replayed, the bonus token, 8 drafts


def kda_step(
    q: Float[Array, "B H K"],
    k: Float[Array, "B H K"],
    v: Float[Array, "B HV V"],
    g: Float[Array, "B HV K"] | Float[Array, "B HV"] | None,
    beta: Float[Array, "B HV"],
    state: Float[Array, "N HV K V"],
    *,
    slots: Int[Array, " B"] | None = None,
    has_state: Bool[Array, " B"] | None = None,
    erase: bool = True,
    backend: str | None = None,
) -> tuple[Float[Array, "B HV V"], Float[Array, "N HV K V"]]:
    """`kda` for one token per request.

    Args:
        q, k, v, g, beta, erase: as in `kda`, without the axis of tokens.
        state: the memories, float32: one per request (N = B), or with `slots` a pool of N.
        slots: the request's row of the pool. Donate the pool to the compiled step, and it is
            updated in place. Ids must differ and lie in the pool: outside jit others raise
            (`slots.check_slots`); inside, an id outside the pool reads an empty memory and writes
            nothing, which is how to mark an idle row.
        has_state: False for a request without computed tokens: its memory counts as empty,
            whatever is stored. None: all have one.
        backend: `triton_gpu` or `chunked` must run; None takes the first that can.

    Returns: outputs in v's dtype, and the new memories (the whole pool with `slots`).
    Numerics: float32.
    Cost: 6 K V per head; each memory is fetched once and stored once.
    """
    window = _window(q, k, v, g, beta)
    _check(*window, state=state, slots=slots, has_state=has_state)
    run = dispatch.choose("kda_step", STEP_BACKENDS, backend, q, v, state)
    return run(q, k, v, g, beta, state, slots, has_state, erase)


def kda_verify(
    q: Float[Array, "B W H K"],
    k: Float[Array, "B W H K"],
    v: Float[Array, "B W HV V"],
    g: Float[Array, "B W HV K"] | Float[Array, "B W HV"] | None,
    beta: Float[Array, "B W HV"],
    state: Float[Array, "N HV K V"],
    commit: Int[Array, " B"],
    *,
    slots: Int[Array, " B"] | None = None,
    has_state: Bool[Array, " B"] | None = None,
    erase: bool = True,
) -> tuple[Float[Array, "B W HV V"], Float[Array, "N HV K V"]]:
    """A window of speculative decoding: outputs of every token, the memory after the first few.

    A window holds the a drafts accepted last time, which are replayed, then the bonus token, then
    the new drafts; commit = a + 1. So a rejected draft never enters a memory (serving.md 5). A
    shorter window is padded on the right with anything: no token sees a later one.

    Args:
        q, k, v, g, beta: up to 17 tokens per request, otherwise as in `kda`.
        commit: tokens of the window after which the memory is taken, 0 to W.
        state, slots, has_state, erase: as in `kda_step`.

    Returns: outputs in v's dtype, and the new memories (the whole pool with `slots`).
    Numerics: float32.
    Cost: O(W (K V + W (K + V))) per head; each memory is fetched twice and stored once, whatever W.
    """
    B, W = q.shape[:2]
    if not 1 <= W <= MAX_WINDOW:
        raise ValueError(
            f"the window has {W} tokens, 1 to {MAX_WINDOW} fit; verify fewer drafts at a time"
        )
    if commit.shape != (B,):
        raise ValueError(f"commit has shape {commit.shape}, expected {(B,)} with q {q.shape}")
    if not isinstance(commit, jax.core.Tracer) and B:
        counts = np.asarray(commit)
        if counts.min() < 0 or counts.max() > W:
            raise ValueError(f"commit must lie in 0 to {W}, the window, got {counts.tolist()}")
    _check(q, k, v, g, beta, state=state, slots=slots, has_state=has_state)
    return _decode(q, k, v, g, beta, state, commit, slots, has_state, erase)


def _check(q, k, v, g, beta, *, state, slots, has_state) -> None:
    """Raises if shapes or slots do not fit; arguments as in `kda_verify`."""
    B, W, H, K = q.shape
    HV, V = v.shape[2:]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    rows = state.shape[0] if slots is not None else B
    wanted = {
        "k": (k, (B, W, H, K)),
        "v": (v, (B, W, HV, V)),
        "g": (g, (B, W, HV) if g is not None and g.ndim == 3 else (B, W, HV, K)),
        "beta": (beta, (B, W, HV)),
        "state": (state, (rows, HV, K, V)),
        "slots": (slots, (B,)),
        "has_state": (has_state, (B,)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape} with q {q.shape}")
    if HV % H:
        raise ValueError(f"v has {HV} heads, which is not a multiple of the {H} heads of q and k")
    if slots is not None and state.dtype != wide:
        raise ValueError(f"state is a pool of {state.dtype}; the memories must be {wide}")

    if slots is not None:
        pools.check_slots(slots, rows)


def _window(*token):
    """A token's arrays as those of a window of one."""
    return tuple(None if x is None else x[:, None] for x in token)


def _step(q, k, v, g, beta, state, slots, has_state, erase):
    """`kda_step` in plain JAX."""
    q, k, v, g, beta = _window(q, k, v, g, beta)
    o, state = _decode(q, k, v, g, beta, state, None, slots, has_state, erase)
    return o[:, 0], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _step_gpu(q, k, v, g, beta, state, slots, has_state, erase):
    """`kda_step` by the GPU kernel; its gradient, which nothing needs to be fast, is `_step`'s."""
    shape = (*v.shape[:2], q.shape[-1])
    if g is None:
        g = jnp.zeros(shape, jnp.float32)
    elif g.ndim == 2:
        g = jnp.broadcast_to(g[..., None], shape)
    return gpu_decode.triton_gpu(q, k, v, g, beta, state, slots, has_state, erase)


def _step_gpu_forward(*args):
    return _step_gpu(*args), args[:-1]


def _step_gpu_backward(erase, args, cotangents):
    *floats, slots, has_state = args

    def run(q, k, v, g, beta, state):
        return _step(q, k, v, g, beta, state, slots, has_state, erase)

    return *jax.vjp(run, *floats)[1](cotangents), None, None


_step_gpu.defvjp(_step_gpu_forward, _step_gpu_backward)

STEP_BACKENDS: dict[str, dispatch.Backend] = {
    "triton_gpu": (_step_gpu, gpu_decode.unsupported),
    "chunked": (_step, dispatch.always),
}


def _decode(q, k, v, g, beta, state, commit, slots, has_state, erase):
    """Grouped heads, the memories of a batch or a pool."""
    B, W, H, _ = q.shape
    HV = v.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)

    q, k = (jnp.repeat(x, HV // H, axis=2) if HV > H else x for x in (q, k))
    if g is None:
        g = jnp.zeros_like(k)
    elif g.ndim == 3:
        g = jnp.broadcast_to(g[..., None], k.shape)
    q, k, v_wide, g, beta = (jnp.moveaxis(x, 2, 1).astype(wide) for x in (q, k, v, g, beta))
    decay = jnp.exp(g)
    kept = jnp.full(B, W) if commit is None else commit

    # A pool is visited request by request: so it is updated in place and only one memory exists
    # beside it. Taking all of them out and putting them back would hold two batches of them.
    if slots is None:
        state = pools.read(state, None, has_state).astype(wide)
        reads = _read(q, k, decay, state)
        o, corrections = _correct(q, k, v_wide, decay, beta, reads, erase)
        state = _write(k, decay, corrections, kept, state)
    elif W == 1:

        def one(pool, x):
            slot, has, q, k, v, decay, beta, kept = jax.tree.map(lambda a: a[None], x)
            memory = pools.read(pool, slot, has)
            reads = _read(q, k, decay, memory)
            o, corrections = _correct(q, k, v, decay, beta, reads, erase)
            return pools.write(pool, slot, _write(k, decay, corrections, kept, memory)), o[0]

        xs = (slots, has_state, q, k, v_wide, decay, beta, kept)
        state, o = jax.lax.scan(one, state, xs)
    else:
        # Visited twice, so that the tokens between, W small steps, are those of all requests at once.
        def read(_, x):
            slot, has, q, k, decay = jax.tree.map(lambda a: a[None], x)
            return None, _read(q, k, decay, pools.read(state, slot, has))[0]

        def write(pool, x):
            slot, has, k, decay, corrections, kept = jax.tree.map(lambda a: a[None], x)
            memory = pools.read(pool, slot, has)
            return pools.write(pool, slot, _write(k, decay, corrections, kept, memory)), None

        _, reads = jax.lax.scan(read, None, (slots, has_state, q, k, decay))
        o, corrections = _correct(q, k, v_wide, decay, beta, reads, erase)
        state, _ = jax.lax.scan(write, state, (slots, has_state, k, decay, corrections, kept))
    return jnp.moveaxis(o, 1, 2).astype(v.dtype), state


# The recurrence with the memory S kept apart from what the window adds to it:
#
#     S_i = Diag(D_i) S + sum_{j <= i} c_ij u_j^T
#
# D_i is the decay of the window up to token i, c_ij = k_j decayed from j to i, u_j the correction
# that token j writes. Only the reads (D_i q_i)^T S and (D_i k_i)^T S, taken for all tokens at once,
# and the final update touch S.


def _read(
    q: Float[Array, "B H W K"],
    k: Float[Array, "B H W K"],
    decay: Float[Array, "B H W K"],
    state: Float[Array, "B H K V"],
) -> Float[Array, "B H 2*W V"]:
    """What all queries, and then all keys, find in the memory that enters the window."""
    through = jnp.cumprod(decay, axis=2)
    rows = jnp.concatenate([through * q, through * k], axis=2)
    return _einsum("bhwk,bhkv->bhwv", rows, state)


def _correct(
    q: Float[Array, "B H W K"],
    k: Float[Array, "B H W K"],
    v: Float[Array, "B H W V"],
    decay: Float[Array, "B H W K"],
    beta: Float[Array, "B H W"],
    reads: Float[Array, "B H 2*W V"],
    erase: bool,
) -> tuple[Float[Array, "B H W V"], Float[Array, "B H W V"]]:
    """Outputs and corrections u, token by token."""

    def token(carry, x):
        columns, corrections = carry  # c_ij and u_j, zeros for the tokens from i on
        i, q_i, k_i, v_i, decay_i, beta_i, read_i, known_i = x
        columns *= decay_i[:, :, None]
        error = v_i
        if erase:
            seen = _einsum("bhwk,bhk->bhw", columns, k_i)
            error = v_i - known_i - _einsum("bhw,bhwv->bhv", seen, corrections)
        columns = columns.at[:, :, i].set(k_i)
        corrections = corrections.at[:, :, i].set(beta_i[..., None] * error)
        seen = _einsum("bhwk,bhk->bhw", columns, q_i)
        return (columns, corrections), read_i + _einsum("bhw,bhwv->bhv", seen, corrections)

    tokens = [q, k, v, decay, beta, *jnp.split(reads, 2, axis=2)]
    xs = (jnp.arange(q.shape[2]), *(jnp.moveaxis(x, 2, 0) for x in tokens))
    (_, corrections), o = jax.lax.scan(token, (jnp.zeros_like(k), jnp.zeros_like(v)), xs)
    return jnp.moveaxis(o, 0, 2), corrections


def _write(
    k: Float[Array, "B H W K"],
    decay: Float[Array, "B H W K"],
    corrections: Float[Array, "B H W V"],
    kept: Int[Array, " B"],
    state: Float[Array, "B H K V"],
) -> Float[Array, "B H K V"]:
    """The memory after the first `kept` tokens."""
    # Selects, because what stands behind those tokens may be anything.
    keep = (jnp.arange(k.shape[2]) < kept[:, None])[:, None, :, None]
    decay = jnp.where(keep, decay, 1)
    k, corrections = jnp.where(keep, k, 0), jnp.where(keep, corrections, 0)
    to_end = jax.lax.cumprod(decay, axis=2, reverse=True)  # of the token's own decay and all later
    after = jnp.concatenate([to_end[:, :, 1:], jnp.ones_like(k[:, :, :1])], axis=2)
    update = _einsum("bhwk,bhwv->bhkv", k * after, corrections)
    return to_end[:, :, 0, :, None] * state + update


def _einsum(equation: str, *operands: Array) -> Array:
    return jnp.einsum(equation, *operands, precision=jax.lax.Precision.HIGHEST)
