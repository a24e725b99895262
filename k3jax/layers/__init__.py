"""Layers: thin modules that hold parameters over pure functions that do the maths."""

from typing import Any

import jax
import jax.numpy as jnp

# In bfloat16, slow decays round to none at all and selection biases collapse onto each other.
FLOAT32_PARAMS = frozenset({"A_log", "dt_bias", "router_bias"})


def cast_params(params: Any, dtype: str) -> Any:
    """Cast the floating arrays of a parameter tree to `dtype`, all but `FLOAT32_PARAMS`."""

    def cast(path, x):
        keep = path[-1].key in FLOAT32_PARAMS or not jnp.issubdtype(x.dtype, jnp.floating)
        return x if keep else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(cast, params)
