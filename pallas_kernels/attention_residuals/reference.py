"""The mix written out, token by token: what every faster form must equal."""

import numpy as np


def attention_residuals(bank, count, prefix, query, norm, eps, out_norm=None, out_eps=0.0):
    """NumPy float64; arguments as in `api.attention_residuals`, the mixture alone as result."""
    bank, prefix, query, norm = (np.asarray(x, np.float64) for x in (bank, prefix, query, norm))
    mixed = np.zeros_like(prefix)
    for at in np.ndindex(prefix.shape[:-1]):
        sources = [*(row[at] for row in bank[:count]), prefix[at]]
        scores = [(v / np.sqrt(np.mean(v * v) + eps) * norm) @ query for v in sources]
        weights = np.exp(np.array(scores) - max(scores))
        for weight, v in zip(weights / weights.sum(), sources, strict=True):
            mixed[at] += weight * v
    if out_norm is None:
        return mixed
    scale = np.sqrt(np.mean(mixed * mixed, axis=-1, keepdims=True) + out_eps)
    return np.asarray(out_norm, np.float64) * (mixed / scale)
