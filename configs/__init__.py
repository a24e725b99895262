"""Named experiments: values only."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3jax.configs.experiment import ExperimentConfig

# name -> module that holds the function of that name; spelt out so that names are known without importing JAX
PRESETS = {
    "nano": "small",
    "colab": "small",
    "mini": "small",
    "kimi_linear_48b": "k3",
    "kimi_k3": "k3",
}


def preset(name: str) -> "Callable[[], ExperimentConfig]":
    """The function that makes the named experiment. Raises KeyError for an unknown name."""
    from importlib import import_module

    return getattr(import_module(f"k3jax.configs.{PRESETS[name]}"), name)
