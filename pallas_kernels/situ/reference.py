"""The activation written out: what every faster form must equal."""

import numpy as np


def situ(gate, up, gate_cap, up_cap):
    """NumPy float64; arguments as in `api.situ`."""
    g, u = (np.asarray(x, np.float64) for x in (gate, up))
    if up_cap is not None:
        u = up_cap * np.tanh(u / up_cap)
    return gate_cap * np.tanh(g / gate_cap) / (1 + np.exp(-g)) * u
