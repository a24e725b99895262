"""AttnRes: the mix against the official numbers, masking, pushes, schedules of the three kinds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.layers.attention_residuals import AttnResConfig, mix, push
from tests.golden_io import cases, check, load

BLOCK = AttnResConfig(kind="block", block_size=12)


@pytest.mark.golden
@pytest.mark.parametrize("case", cases("attn_res"))
def test_golden_mix(case):
    meta, t = load(case)
    tags = sorted(
        {
            name.rsplit(".prefix_sum", 1)[0]
            for name in t
            if name.endswith(".prefix_sum") and "grad" not in name
        }
    )
    assert tags
    for tag in tags:
        prefix = jnp.asarray(t[f"{tag}.prefix_sum"])[None]
        rows = t.get(f"{tag}.block_residual")
        bank = (
            jnp.zeros((0, *prefix.shape))
            if rows is None
            else jnp.asarray(rows).swapaxes(0, 1)[:, None]
        )
        norm = jnp.asarray(t[f"{tag}.weights.norm.weight"])
        query = jnp.asarray(t[f"{tag}.weights.proj.weight"])[0]

        def run(bank, prefix, query, norm):
            return mix(bank, bank.shape[0], prefix, query, norm, 1e-5)

        y, pull = jax.vjp(run, bank, prefix, query, norm)
        check(f"{tag}.y", y[0], meta)
        d_bank, d_prefix, d_query, d_norm = pull(jnp.asarray(t[f"{tag}.d_y"])[None])
        check(f"{tag}.grad_prefix", d_prefix[0], meta)
        if rows is not None:
            check(f"{tag}.grad_blocks", d_bank[:, 0].swapaxes(0, 1), meta)
        check(f"{tag}.grad_norm_weight", d_norm, meta)
        check(f"{tag}.grad_proj_weight", d_query[None], meta)


def _inputs(rows=5, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    bank = jax.random.normal(keys[0], (rows, 2, 3, 8))
    prefix = jax.random.normal(keys[1], (2, 3, 8))
    return bank, prefix, jax.random.normal(keys[2], (8,)), jax.random.normal(keys[3], (8,))


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_rows_beyond_count_do_not_matter(count):
    """A traced count masks; rows that were never written may hold anything finite and get no gradient."""
    bank, prefix, query, norm = _inputs()
    poisoned = bank.at[count:].set(1e12)
    args = (prefix, query, norm, 1e-5)
    want = mix(bank, count, *args)
    np.testing.assert_allclose(
        jax.jit(mix, static_argnums=5)(poisoned, jnp.int32(count), *args),
        want,
        rtol=1e-5,
        atol=1e-6,
    )
    grad = jax.grad(lambda b: mix(b, jnp.int32(count), *args).sum())(poisoned)
    assert not grad[count:].any()
    assert jnp.isfinite(grad).all()


def test_zero_query_is_the_average():
    bank, prefix, query, norm = _inputs()
    got = mix(bank, 5, prefix, jnp.zeros_like(query), norm, 1e-5)
    np.testing.assert_allclose(got, (bank.sum(0) + prefix) / 6, rtol=1e-5, atol=1e-6)


def test_bfloat16_mix_rounds_once():
    bank, prefix, query, norm = _inputs()
    low = [x.astype(jnp.bfloat16) for x in (bank, prefix)]
    got = mix(low[0], 5, low[1], query, norm, 1e-5)
    want = mix(low[0].astype(jnp.float32), 5, low[1].astype(jnp.float32), query, norm, 1e-5)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_push_appends_and_clears():
    bank, prefix, *_ = _inputs()
    for when in (True, jnp.bool_(True)):
        new, rest = push(bank, 2, prefix, when)
        np.testing.assert_array_equal(new[2], prefix)
        np.testing.assert_array_equal(new[jnp.array([0, 1, 3, 4])], bank[jnp.array([0, 1, 3, 4])])
        assert not rest.any()
    for when in (False, jnp.bool_(False)):
        new, rest = push(bank, 5, prefix, when)  # a full bank that is not pushed to stays as it is
        np.testing.assert_array_equal(new, bank)
        np.testing.assert_array_equal(rest, prefix)


def test_schedule_of_the_released_model():
    pushes = [i for i in range(93) if BLOCK.before_attention(i)[1]]
    assert pushes == [0, 12, 24, 36, 48, 60, 72, 84]
    assert BLOCK.num_rows(93) == 8
    for i in range(1, 93):
        assert BLOCK.before_attention(i)[0] + 1 == -(-i // 12) + 1
        assert BLOCK.before_mixer(i)[0] + 1 == i // 12 + 2


def test_full_keeps_every_sub_layer():
    full = AttnResConfig(kind="full", block_size=None)
    assert full.num_rows(3) == 6
    assert [full.before_attention(i) for i in range(3)] == [(0, True), (2, True), (4, True)]
    assert [full.before_mixer(i) for i in range(3)] == [(1, True), (3, True), (5, True)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(kind="blocks", block_size=4), "blocks"),
        (dict(kind="block", block_size=None), "block_size=None"),
        (dict(kind="none", block_size=4), "block_size=4"),
        (dict(kind="block", block_size=0), "0"),
    ],
)
def test_bad_config_names_the_value(fields, words):
    with pytest.raises(ValueError, match=words):
        AttnResConfig(**fields)
