"""The convolution written out, one token at a time: what every faster form must equal."""

import numpy as np


def short_conv(x, kernel, cache, segment_ids):
    """NumPy float64; arguments and results as `api.short_conv`, all of them given.

    The window moves with the real tokens only, and is emptied where a document begins.
    """
    x, kernel, cache = (np.asarray(a, np.float64) for a in (x, kernel, cache))
    y, new_cache = np.zeros_like(x), np.zeros_like(cache)
    for b in range(x.shape[0]):
        window = cache[b]  # the last W - 1 inputs of the document, oldest first
        document = None
        for t in np.flatnonzero(segment_ids[b]):
            if document is not None and segment_ids[b, t] != document:
                window = np.zeros_like(window)
            document = segment_ids[b, t]
            taps = np.concatenate([window, x[b, t][None]])
            y[b, t] = (kernel * taps).sum(0)
            window = taps[1:]
        new_cache[b] = window
    return y / (1 + np.exp(-y)), new_cache
