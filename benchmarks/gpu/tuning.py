"""Triton's tuner compiles its candidates one by one, just before it times each; here all at once."""

from concurrent.futures import ThreadPoolExecutor

import triton
from triton.runtime.autotuner import Autotuner


def compile_candidates_at_once(threads: int | None = None) -> None:
    """From now on. fla's kernels have hundreds of candidates, minutes of compilation.

    Args:
        threads: that compile; by default as many as the machine has cores, and four more.
    """
    run, seen = Autotuner.run, set()

    def compiled_first(self, *args, **kwargs):
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        named = self.nargs | kwargs
        key = (id(self), *(named[name] for name in self.keys if name in named))
        if len(self.configs) > 1 and key not in seen:
            seen.add(key)
            with (
                ThreadPoolExecutor(threads) as pool,
                triton.AsyncCompileMode(pool, ignore_errors=True),
            ):
                for config in self.prune_configs(kwargs):
                    self.fn.run(*args, **{**kwargs, "warmup": True}, **config.all_kwargs())
        return run(self, *args, **kwargs)

    Autotuner.run = compiled_first
