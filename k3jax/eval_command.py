"""`k3jax eval`: loss and bits per byte of a trained or imported model."""

from dataclasses import dataclass, field

from k3jax.errors import UserError
from k3jax.sharding.mesh_config import MeshConfig


@dataclass(frozen=True, kw_only=True)
class EvalArgs:
    run_dir: str | None = None  # folder of a run, or of an imported model
    step: int | None = None  # checkpoint to use; None: the newest
    data: str | None = None  # file, folder or glob, all of it; None: the run's validation data
    batches: int | None = None  # at most this many; None: everything
    tokenizer: str | None = None  # "bytes", or a vocabulary's file or folder; None: the model's own
    # How several devices share the work and the model; all 1: one device
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(data=1))
    platform: str | None = None  # cpu, cuda or tpu: insist on it; None: what JAX finds


def check_args(asked: EvalArgs) -> None:
    """Raises UserError for values that cannot be."""
    if asked.run_dir is None:
        raise UserError("which run? give --run-dir DIR")
    if asked.batches is not None and asked.batches < 1:
        raise UserError(f"batches is {asked.batches}; it must be at least 1, or None")


def evaluate_model(asked: EvalArgs) -> int:
    """The command; returns the exit code."""
    import jax

    from k3jax import hosts
    from k3jax.data.packing import make_eval_batches
    from k3jax.data.text import load_corpus
    from k3jax.data.tokenizer import MODELS_OWN, check_vocabulary, load_tokenizer
    from k3jax.run_dir import load_config, load_trained
    from k3jax.sharding.mesh import check_batch, mesh_of_several
    from k3jax.train import evaluate, placed
    from k3jax.train_step import make_eval_step

    assert asked.run_dir is not None
    cfg = load_config(asked.run_dir, step=asked.step)
    rows = cfg.batch_size // cfg.accumulation
    try:
        mesh = mesh_of_several(asked.mesh)
        if mesh is not None:
            check_batch(mesh.shape, rows=rows, tokens=cfg.seq_len)
        trained = load_trained(asked.run_dir, step=asked.step, mesh=mesh)
    except UserError:
        raise
    except ValueError as error:  # a mesh that does not fit devices, batch or model
        raise UserError(str(error)) from error
    tokenizer = load_tokenizer(asked.tokenizer or cfg.tokenizer)
    check_vocabulary(tokenizer, cfg.model.vocab_size, fix=MODELS_OWN)
    corpus = load_corpus(asked.data or cfg.data, strict=cfg.strict)
    split = corpus.split("all" if asked.data else "validation")
    batches = make_eval_batches(
        split, tokenizer, seq_len=cfg.seq_len, rows=rows, num_batches=asked.batches
    )
    step = make_eval_step(cfg, tokenizer.token_bytes(), mesh=mesh)
    try:
        if mesh is None:
            found = evaluate(step, trained, batches)
        else:
            with jax.set_mesh(mesh):
                found = evaluate(step, trained, placed(batches, mesh))
    except hosts.HostError as error:
        raise error.origin() from error.mine
    if not found:
        raise UserError(f"data {corpus.name!r} has no text to predict: add some")
    if hosts.index() == 0:
        part = "" if asked.batches is None else f", first {asked.batches} batches"
        bytewise = ""
        if "val_bits_per_byte" in found:
            bytewise = f", {found['val_bits_per_byte']:.4f} bits per byte"
        print(
            f"step {trained.step}: loss {found['val_loss']:.4f} nats per token{bytewise} "
            f"on {corpus.name} ({split.name}{part})"
        )
    return 0
