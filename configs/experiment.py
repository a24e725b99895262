"""What one run is: the model, how it is trained, on what, and where it is kept."""

from dataclasses import dataclass, field

from k3jax.model import K3Config
from k3jax.optim.build import OptimConfig
from k3jax.sharding.mesh import MeshConfig


@dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    name: str  # of the preset that this run started from
    model: K3Config
    steps: int  # optimizer steps in all
    batch_size: int  # rows per optimizer step, over all hosts and accumulation steps
    seq_len: int  # tokens per row
    accumulation: int = 1  # forward-backward passes per optimizer step; divides batch_size
    seed: int = 0  # of initialisation and data order
    data: str | None = None  # file, folder or glob; None: the running Python's standard library
    tokenizer: str = "bytes"  # "bytes", or the path of a tokenizer.json or tiktoken file
    run_dir: str | None = None  # folder of the run; None: runs/<name>
    init_from: str | None = None  # model folder whose weights to start from; None: random ones
    checkpoint_every: int  # steps between checkpoints
    keep_last: int = 3  # newest checkpoints kept
    keep_every: int | None = None  # steps; multiples of this are kept for good
    eval_every: int  # steps between validations; 0: none
    eval_batches: int = 8  # validation batches each time
    log_every: int = 1  # steps between log lines where there is no terminal
    strict: bool = False  # stop at an unreadable document instead of skipping and counting it
    platform: str | None = None  # cpu, cuda or tpu: insist on it; None: what JAX finds
    optim: OptimConfig = field(default_factory=OptimConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)

    def __post_init__(self):
        for name in ("batch_size", "accumulation", "checkpoint_every", "keep_last",
                     "eval_batches", "log_every"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.seq_len < 2:
            raise ValueError(
                f"seq_len is {self.seq_len}; it must be at least 2, for one token has none to predict"
            )
        for name in ("steps", "eval_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.run_dir == "":
            raise ValueError("run_dir is empty; name a folder, or leave it out for runs/<name>")
        if self.keep_every is not None and self.keep_every < 1:
            raise ValueError(f"keep_every is {self.keep_every}; it must be at least 1, or None")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2**32")
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulation={self.accumulation} passes"
            )
        if self.platform not in (None, "cpu", "cuda", "tpu"):
            raise ValueError(f"platform is {self.platform!r}; use cpu, cuda or tpu")
