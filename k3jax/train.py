"""The training loop: prepare, resume, step, measure, validate, save, stop.

`train(cfg)` refuses bad input before it writes anything, continues from the newest checkpoint of
the run folder, and leaves one of these exit codes. Several processes agree before each program that
they compute together (`hosts.py`); all save, process 0 alone writes the other files and the terminal.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from rich.console import Console

from k3jax import devices, hosts
from k3jax.checkpoint import CheckpointWriter, restore
from k3jax.configs.experiment import ExperimentConfig
from k3jax.data.packing import (
    TrainIterator,
    join_positions,
    make_eval_batches,
    make_train_iterator,
)
from k3jax.data.text import load_corpus
from k3jax.data.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from k3jax.display import Display
from k3jax.errors import UserError
from k3jax.flops import flops_per_token, parameter_counts, peak_flops, state_tree_bytes
from k3jax.initial_state import check_trainable, initial_state
from k3jax.meter import Diverged, Meter
from k3jax.metrics import MetricsLog
from k3jax.official_folder import pass_on
from k3jax.run_dir import RunDir, to_json
from k3jax.sharding.mesh import batch_sharding, check_batch, make_mesh, rows_sharding
from k3jax.stop_signal import StopSignal
from k3jax.train_state import TrainState, abstract_state
from k3jax.train_step import make_eval_step, make_train_step

DONE, DIVERGED, NOTHING_LEFT = 0, 3, 4  # exit codes; 2 is bad input
SAMPLE_TOKENS = 200  # of the text printed at the end
LIBRARY_PROMPT = "def "  # what the sample continues when the data is Python source


@dataclass(frozen=True)
class Setup:
    """What a run needs beside its state; making it writes nothing."""

    cfg: ExperimentConfig
    tokenizer: Tokenizer
    data: TrainIterator
    held: Sequence[int]  # rows of each batch that this process's devices hold
    validation: grain.IterDataset | None
    mesh: Mesh
    abstract: TrainState  # shapes, dtypes and shardings
    flops_per_token: float  # of training


def train(
    cfg: ExperimentConfig,
    *,
    display: Display | None = None,
    on: Sequence[jax.Device] | None = None,
) -> int:
    """Trains, or continues, the run of `cfg`; returns the exit code.

    Args:
        cfg: the run; its folder decides whether it starts or continues.
        display: where notes and figures go; the terminal if omitted.
        on: devices of the mesh; all if omitted.

    Returns: 0 when the last step was reached or a signal stopped the run after a checkpoint, 3
        after `optim.max_skipped_steps` steps in a row that were not finite (the last checkpoint is
        from before them), 4 if the run has all its steps already.
    Raises: UserError for bad input, before anything is written, and when the disk refuses.
    """
    hosts.connect()
    run = RunDir(cfg.run_dir or f"runs/{cfg.name}")
    check_trainable(cfg)
    if cfg.init_from is not None and run.path.resolve() == Path(cfg.init_from).resolve():
        raise UserError(
            f"{run.path} is the model that training starts from: choose another --run-dir"
        )
    speaks = hosts.index() == 0
    try:
        with StopSignal() as stop, hosts.announced():
            if speaks:
                run.open()
            run.check(cfg)
            start = run.latest_step() or 0
            hosts.same("the newest checkpoint at step", start)
            console = None if speaks else Console(quiet=True)
            shown = display or Display(
                start=start, total=cfg.steps, every=cfg.log_every, console=console
            )
            if start >= cfg.steps:
                shown.note(
                    f"nothing to do: {run.path} is at step {start} and --steps is {cfg.steps}; "
                    "raise --steps to continue, or choose another --run-dir"
                )
                return NOTHING_LEFT
            setup = prepare(cfg, shown, on)
            hosts.same("configuration and data", _digest(setup))
            state = _restored(setup, run) if run.latest_step() is not None else None
            where = f"continues after step {start}"
            if state is None:
                where = "new"
                if cfg.init_from is not None:  # now: nothing is written if the model does not fit
                    state = initial_state(cfg, setup.mesh, setup.abstract)
                    where = f"new, from the weights of {cfg.init_from}"
            shown.note(
                f"run folder {run.path}: {where}; SIGTERM or Ctrl-C saves and stops (preemption service off)"
            )
            if hosts.turn(lambda: None, stop.name, patience=hosts.STARTING).stopped:
                shown.note("stopped before the first step; nothing was written")
                return DONE
            if speaks:
                run.create(cfg)
                if start == 0 and cfg.init_from is not None:
                    pass_on(Path(cfg.init_from), run.path)
            return _run(setup, run, state, start, stop, shown)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"{cfg.name} ran out of device memory ({str(error).splitlines()[0][:150]}): raise "
            "--accumulation, lower --batch-size or --seq-len, or use --model.remat full"
        ) from error
    finally:
        run.close()


def prepare(
    cfg: ExperimentConfig, display: Display, on: Sequence[jax.Device] | None = None
) -> Setup:
    """Backend, data, model shapes, memory: everything that can refuse a run, in that order."""
    devices.start_backend(cfg.platform)
    devices.use_compilation_cache()
    display.note(devices.describe())
    tokenizer = load_tokenizer(cfg.tokenizer)
    check_vocabulary(tokenizer, cfg.model.vocab_size)
    try:
        mesh = make_mesh(cfg.mesh, on)
        passes, rows = cfg.accumulation, cfg.batch_size // cfg.accumulation
        try:
            check_batch(mesh.shape, rows=rows, tokens=cfg.seq_len)
        except ValueError as error:
            given = f"batch_size={cfg.batch_size}, accumulation={passes}, seq_len={cfg.seq_len}"
            raise UserError(f"{given} on {mesh.size} devices: {error}") from error
        abstract = abstract_state(cfg.model, cfg.optim, mesh)
        counts = parameter_counts(cfg.model)
    except UserError:
        raise
    except ValueError as error:  # shapes that do not go together, or not over this mesh
        raise UserError(str(error)) from error
    memory = devices.check_memory(
        cfg,
        parameters=_held_size(abstract.params),
        state_bytes=state_tree_bytes(jax.tree.map(_held, abstract)),
        num_devices=mesh.size,
    )
    display.note(
        f"model {cfg.name}: {counts.total / 1e6:,.1f} M parameters, {counts.active / 1e6:,.1f} M "
        f"active, computes in {cfg.model.dtype}, keeps {cfg.model.param_dtype}"
    )
    display.note(memory)
    corpus = load_corpus(cfg.data, strict=cfg.strict)
    display.note(corpus.describe())
    validation = None
    if cfg.eval_every:
        validation = make_eval_batches(
            corpus.split("validation"),
            tokenizer,
            seq_len=cfg.seq_len,
            rows=rows,
            num_batches=cfg.eval_batches,
        )
    held, first = _rows_here(batch_sharding(mesh), (passes, rows, cfg.seq_len))
    data = make_train_iterator(
        corpus.split("train"),
        tokenizer,
        seq_len=cfg.seq_len,
        batch_size=cfg.batch_size,
        seed=cfg.seed,
        held=held,
        first=first,
    )
    flops = flops_per_token(cfg.model, cfg.seq_len, counts.matmul)
    return Setup(cfg, tokenizer, data, held, validation, mesh, abstract, flops)


def _held(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What one device holds of an array."""
    assert leaf.sharding is not None
    return jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _held_size(tree: Any) -> int:
    return sum(math.prod(_held(leaf).shape) for leaf in jax.tree.leaves(tree))


def _rows_here(sharding: NamedSharding, shape: tuple[int, int, int]) -> tuple[list[int], list[int]]:
    """Rows of a whole batch that this process's devices hold, and of these the ones that no process
    of a lower number holds: with `context` or `tensor` over processes, several hold the same.

    Args:
        sharding: of a batch.
        shape: [accumulation, rows, tokens]; row r of pass a is row a · rows + r of the whole batch.
    """
    row = np.arange(shape[0] * shape[1]).reshape(shape[:2])
    lowest = np.full(row.size, hosts.count())
    held = np.zeros(row.size, bool)
    for device, index in sharding.devices_indices_map(shape).items():
        rows = row[index[:2]]
        lowest[rows] = np.minimum(lowest[rows], device.process_index)
        held[rows] |= device.process_index == hosts.index()
    first = held & (lowest == hosts.index())
    return np.flatnonzero(held).tolist(), np.flatnonzero(first).tolist()


def _digest(setup: Setup) -> str:
    """What must be the same on all processes, in a few letters."""
    text = json.dumps([to_json(setup.cfg), setup.data.identity], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _restored(setup: Setup, run: RunDir) -> TrainState:
    found = restore(run.checkpoints, setup.abstract)
    setup.data.set_state(join_positions(found.data))
    return found.state


def compiled_steps(setup: Setup) -> tuple[Callable, Callable]:
    """Training and validation step, to be called under `jax.set_mesh`. The placement of the state is fixed: left to the compiler, the
    first output has another one than the first input, and the second call compiles again (KF-117).
    """
    token_bytes = setup.tokenizer.token_bytes()
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract)
    train_step = jax.jit(
        make_train_step(setup.cfg, token_bytes, mesh=setup.mesh),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )
    return train_step, make_eval_step(setup.cfg, token_bytes, mesh=setup.mesh)


def _place(setup: Setup, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """The held rows of a batch as this process's part of the global [accumulation, rows, tokens]."""
    cfg = setup.cfg
    shape = (cfg.accumulation, cfg.batch_size // cfg.accumulation, cfg.seq_len)
    place = np.full(cfg.batch_size, -1)
    place[setup.held] = np.arange(len(setup.held))
    place = place.reshape(shape[:2])

    def placed(values: np.ndarray) -> jax.Array:
        def part(index: Any) -> np.ndarray:
            passes, rows, tokens = index
            return values[place[passes, rows], tokens]

        return jax.make_array_from_callback(shape, batch_sharding(setup.mesh), part)

    return {name: placed(values) for name, values in batch.items()}


def _run(
    setup: Setup,
    run: RunDir,
    state: TrainState | None,
    start: int,
    stop: StopSignal,
    display: Display,
) -> int:
    cfg = setup.cfg
    if state is None:
        state = initial_state(cfg, setup.mesh, setup.abstract)
    train_step, eval_step = compiled_steps(setup)
    meter = _meter(setup, skipped=int(state.skipped))
    log = MetricsLog(run, resume_step=start) if hosts.index() == 0 else None
    saver = CheckpointWriter(run.checkpoints, keep_last=cfg.keep_last, keep_every=cfg.keep_every)
    step, record = start, {}
    in_flight: dict[str, jax.Array] | None = None  # metrics of `step`, not yet waited for

    def finish(extra: dict[str, float] | None = None) -> None:
        """Waits for the step in flight and writes its record; raises Diverged."""
        nonlocal in_flight, record
        if in_flight is not None:
            record = meter.record(step, in_flight) | (extra or {})
            in_flight = None
            if log is not None:
                log.write(record)
                display.step(record)
            meter.check(step)

    def save() -> None:
        finish()
        if step != saver.last_step:
            saver.save(step, state, setup.data, to_json(cfg))

    stopped = None
    try:
        with saver, display, hosts.announced(), jax.set_mesh(setup.mesh):
            try:
                while step < cfg.steps:
                    patience = hosts.STARTING if step < start + 2 else 1.0
                    turn = hosts.turn(setup.data.peek, stop.name, patience=patience)
                    if stopped := turn.stopped:
                        break
                    if turn.ended:
                        raise UserError("the data ended before the last step; lower --steps")
                    state, metrics = train_step(state, _place(setup, next(setup.data)))
                    saver.check()
                    finish()  # the step before: one step late, so that the device never waits
                    step, in_flight = step + 1, metrics
                    last = step == cfg.steps
                    if cfg.eval_every and (last or step % cfg.eval_every == 0):
                        jax.block_until_ready(metrics)
                        meter.pause()
                        assert setup.validation is not None
                        validation = placed(setup.validation, setup.mesh)
                        finish(evaluate(eval_step, state, validation, stop))
                    if last or step % cfg.checkpoint_every == 0:
                        save()
                        if log is not None:
                            log.plot()
                        meter.pause()
            except hosts.HostError as error:
                if error.can_save:
                    save()
                raise error.origin() from error.mine
            save()
        if log is not None:
            log.plot()
        if stopped:
            display.note(
                f"stopped by {stopped} after step {step}; checkpoint in "
                f"{run.checkpoints / str(step)}; the same command continues"
            )
            return DONE
        _summary(setup, run, state, record, display)
        _sample(setup, state, stop, display)
        return DONE
    except Diverged as error:
        kept = f"{saver.last_step}" if saver.last_step is not None else "none yet"
        display.note(f"stopped: {error}; last checkpoint: step {kept} in {run.checkpoints}")
        return DIVERGED
    finally:
        if log is not None:
            log.close()
        setup.data.close()


def _meter(setup: Setup, skipped: int) -> Meter:
    cfg, peak = setup.cfg, peak_flops(setup.mesh.devices.flat[0].device_kind)
    tokens = cfg.batch_size * cfg.seq_len
    return Meter(
        tokens=tokens,
        flops=setup.flops_per_token * tokens,
        peak=peak and peak * setup.mesh.size,
        max_skipped=cfg.optim.max_skipped_steps,
        skipped=skipped,
    )


def placed(batches: Iterable[dict[str, np.ndarray]], mesh: Mesh) -> Iterator[dict[str, jax.Array]]:
    """Validation batches [rows, tokens] on the devices of a mesh."""
    sharding = rows_sharding(mesh)
    for batch in batches:
        yield {
            name: jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
            for name, values in batch.items()
        }


def evaluate(
    eval_step: Callable[..., dict[str, jax.Array]],
    state: Any,
    batches: Iterable[dict[str, jax.Array]],
    stop: StopSignal | None = None,
) -> dict[str, float]:
    """Loss of a model on batches, each token counted once.

        val_loss = sum of nats / tokens,    val_bits_per_byte = sum of nats / (ln 2 · bytes)

    Args:
        eval_step: from `make_eval_step`.
        state: has `params` and `buffers`.
        batches: {"tokens", "segment_ids"}, int32 [B, T].
        stop: polled before each batch; a stop, of any process, gives no result.

    Returns: both figures; only what is defined (no bits per byte without byte counts).
    """
    sums: dict[str, float] = {}
    coming = iter(batches)
    while True:
        asked = None if stop is None else stop.name
        turn = hosts.turn(lambda: next(coming), asked, patience=hosts.STARTING)
        if turn.stopped:
            return {}
        if turn.ended:
            break
        for name, value in eval_step(state.params, state.buffers, turn.item).items():
            sums[name] = sums.get(name, 0.0) + float(value)
    found = {}
    if sums.get("tokens"):
        found["val_loss"] = sums["nats"] / sums["tokens"]
    if sums.get("bytes"):
        found["val_bits_per_byte"] = sums["nats"] / (math.log(2) * sums["bytes"])
    return found


def _summary(
    setup: Setup, run: RunDir, state: TrainState, record: dict[str, Any], display: Display
) -> None:
    figures = [f"training loss {record['loss']:.4f}"]
    if "val_loss" in record:
        count = setup.cfg.eval_batches
        sample = f"on {count} batch{'es' if count > 1 else ''}"
        figures.append(f"validation loss {record['val_loss']:.4f} {sample}")
    if "val_bits_per_byte" in record:
        figures.append(f"{record['val_bits_per_byte']:.3f} bits per byte")
    if skipped := int(state.skipped_total):
        figures.append(f"{skipped} steps skipped")
    display.note(f"finished step {record['step']}: {', '.join(figures)}")
    for what, path in (
        ("loss curve", run.plot_file),
        ("figures of every step", run.metrics_file),
        ("checkpoints", run.checkpoints),
    ):
        display.note(f"  {what}: {path}")
    command = "uv run k3jax" if "UV" in os.environ else "k3jax"
    display.note(f"  more text: {command} generate {run.path} --prompt {LIBRARY_PROMPT!r}")


def _sample(setup: Setup, state: TrainState, stop: StopSignal, display: Display) -> None:
    """Prints a short text of the trained model; a stop ends it early."""
    from k3jax.generate import Engine, padded_length
    from k3jax.sample import SamplingConfig

    size = state_tree_bytes(state.params)
    if hosts.count() > 1 or (setup.mesh.size > 1 and size > devices.device_memory() / 8):
        return  # it is not on this process, or too large to be on one device as well
    prompt = LIBRARY_PROMPT if setup.cfg.data is None else ""
    one = SingleDeviceSharding(setup.mesh.devices.flat[0])
    params, buffers = jax.device_put((state.params, state.buffers), one)
    room = padded_length(1 + len(setup.tokenizer.encode(prompt)) + SAMPLE_TOKENS)
    engine = Engine(setup.cfg.model, params, buffers, setup.tokenizer, slots=1, max_len=room)
    asked = {"max_tokens": SAMPLE_TOKENS, "seed": setup.cfg.seed}
    text = prompt
    for piece in engine.stream_text(prompt, sampling=SamplingConfig(temperature=0.7), **asked):
        if stop:
            return
        text += piece
    display.note("sample:\n" + text)
