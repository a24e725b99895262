"""The convolution written out, one token and one tap at a time: what every faster form must equal."""

import numpy as np


def short_conv(x, kernel, cache, segment_ids, lengths):
    """NumPy float64; arguments and results as `api.short_conv`, all of them given."""
    x, kernel, cache = (np.asarray(a, np.float64) for a in (x, kernel, cache))
    B, T = x.shape[:2]
    W = kernel.shape[0]
    y = np.zeros_like(x)
    for b in range(B):
        window = cache[b].copy()  # the last W - 1 inputs of the document, oldest first
        document = None
        for t in range(T):
            if segment_ids[b, t] == 0:
                continue
            if document is not None and segment_ids[b, t] != document:
                window = np.zeros_like(window)
            document = segment_ids[b, t]
            taps = np.concatenate([window, x[b, t][None]])
            y[b, t] = np.einsum("whk,whk->hk", kernel, taps)
            window = taps[1:]
    inputs = np.concatenate([cache, x], axis=1)
    new_cache = np.stack([inputs[b, lengths[b] : lengths[b] + W - 1] for b in range(B)])
    return y / (1 + np.exp(-y)), new_cache
