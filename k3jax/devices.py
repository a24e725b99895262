"""Versions, backend, compilation cache and memory: what is checked before anything is computed.

`check_versions` reads installed metadata only. Nothing here runs at import, so that the command
line can refuse bad input before JAX is loaded.
"""

import importlib.metadata
import logging
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

from k3jax.errors import UserError

if TYPE_CHECKING:
    from k3jax.configs.experiment import ExperimentConfig

CACHE_BYTES = 4 * 2**30  # least recently used programs go first
PAIRED = ("jax", "flax")  # their versions must suit each other: flax reaches into jax
PLUGINS = (
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-rocm7-plugin",
    "jax-rocm7-pjrt",
)

log = logging.getLogger("k3jax")


def installed() -> dict[str, str]:
    """Version of each library that JAX programs depend on, by name; absent ones are left out."""
    names = (*PAIRED, "jaxlib", *PLUGINS, "libtpu", "optax", "orbax-checkpoint", "grain")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def requirements() -> dict[str, Requirement]:
    """The ranges that k3jax's own metadata asks for, by name."""
    asked = importlib.metadata.requires("k3jax") or []
    parsed = map(Requirement, asked)
    return {r.name.lower(): r for r in parsed if r.marker is None or "extra" not in str(r.marker)}


def check_versions(
    versions: dict[str, str] | None = None, python: tuple[int, ...] = sys.version_info[:3]
) -> None:
    """Raises UserError, with the command that repairs it, for versions that do not go together.

    Reads metadata only: a plugin of another version than jaxlib crashes the process at the first
    array, so no backend may be touched before this.

    Args:
        versions: by distribution name; default: the installed ones.
        python: of this process.
    """
    versions = installed() if versions is None else versions
    if python < (3, 12):
        here = ".".join(map(str, python))
        raise UserError(
            f"Python {here} is too old, k3jax needs 3.12 or later: uv python install 3.12"
        )
    asked = requirements()
    pair = " with ".join(f"{name} {versions.get(name, '(absent)')}" for name in PAIRED)
    for name in PAIRED:
        if name not in versions or not asked[name].specifier.contains(versions[name], True):
            fix = " ".join(f'"{name}{asked[name].specifier}"' for name in PAIRED)
            raise UserError(
                f"{pair}: k3jax needs {name}{asked[name].specifier}; run: pip install -U {fix}"
            )
    jax, jaxlib = versions["jax"], versions.get("jaxlib", "(absent)")
    if jaxlib == "(absent)" or _minor(jaxlib) != _minor(jax):
        raise UserError(
            f"jax {jax} with jaxlib {jaxlib}: they must be of one version; "
            f'run: pip install -U "jax=={jax}"'
        )
    for name in PLUGINS:
        if name in versions and _minor(versions[name]) != _minor(jaxlib):
            extra = name.split("-")[1]
            raise UserError(
                f"{name} {versions[name]} with jaxlib {jaxlib}: they must be of one version; "
                f'run: pip install -U "jax[{extra}]=={jax}"'
            )


def start_backend(wanted: str | None) -> None:
    """Initialises JAX's backend, or raises UserError if it is not the one asked for.

    Args:
        wanted: cpu, cuda or tpu; None takes what JAX finds (JAX_PLATFORMS is respected).
    """
    import jax

    if wanted is not None:
        jax.config.update("jax_platforms", wanted)
    asked = wanted or jax.config.jax_platforms
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion where no plugin is installed
        raise UserError(
            f"platform {asked!r} was asked for and is not available ({_first_line(error)}): "
            f"install {_install(asked)}, or ask for --platform cpu"
        ) from error
    names = {"gpu": {"gpu", "cuda", "rocm"}}.get(devices[0].platform, {devices[0].platform})
    if wanted is not None and wanted not in names:  # a backend that was started before, elsewhere
        raise UserError(
            f"platform {wanted!r} was asked for, but JAX already runs on {devices[0].platform!r} "
            "in this process: start a new one"
        )


def use_compilation_cache() -> None:
    """Keeps compiled programs between runs, in K3JAX_CACHE_DIR or the user's cache folder.

    JAX_COMPILATION_CACHE_DIR wins over both; K3JAX_CACHE_DIR="" turns it off. A folder that cannot
    be written is a warning: the run then compiles afresh.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    chosen = os.environ.get("K3JAX_CACHE_DIR", str(base / "k3jax" / "compiled"))
    if not chosen:
        return
    folder = Path(chosen).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        log.warning(
            "compilation cache %s cannot be written (%s): programs are compiled afresh; "
            "set K3JAX_CACHE_DIR to another folder",
            folder,
            error.strerror,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def describe() -> str:
    """One line: versions, backend, devices and their memory."""
    import jax

    devices = jax.devices()
    hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
    return (
        f"k3jax {importlib.metadata.version('k3jax')}, jax {jax.__version__}, "
        f"Python {platform.python_version()}; backend {jax.default_backend()}, "
        f"{len(devices)} x {devices[0].device_kind}{hosts}, "
        f"{device_memory() / 1e9:.1f} GB each"
    )


def device_memory() -> int:
    """Bytes one device may hold; for the CPU backend, its share of the machine's memory."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup/memory.max")  # a container's share
    if group.is_file() and (limit := group.read_text().strip()).isdecimal():
        total = min(total, int(limit))
    return total // jax.local_device_count()


def memory_estimate(
    cfg: "ExperimentConfig", *, parameters: int, state_bytes: int, num_devices: int
) -> tuple[float, float]:
    """Bytes per device that training surely needs, and an estimate with the activations.

    Surely: the training state and float32 gradients. The activations are a rule of thumb: what each
    layer keeps for the backward pass, and the working set of one layer. Arguments as in
    `check_memory`.
    """
    model = cfg.model
    sure = state_bytes + 4 * parameters
    tokens = cfg.batch_size // cfg.accumulation * cfg.seq_len / num_devices
    width = max(model.width, model.kda.num_heads * model.kda.head_dim)
    # values of this width, per layer
    kept = {"none": 30, "dots": 14, "routed": 3, "outputs": 4, "offload": 1}.get(model.remat, 2)
    values = tokens * width * (kept * model.num_layers + 40)
    itemsize = 2 if model.dtype in ("bfloat16", "float16") else 4
    return sure, sure + values * itemsize


def check_memory(
    cfg: "ExperimentConfig", *, parameters: int, state_bytes: int, num_devices: int
) -> str:
    """One line comparing the estimate with a device's memory.

    Args:
        cfg: the run.
        parameters: that one device holds.
        state_bytes: of the training state that one device holds.
        num_devices: of the mesh.

    Raises: UserError if parameters, optimizer state and gradients alone do not fit.
    """
    have = device_memory()
    sure, estimate = memory_estimate(
        cfg, parameters=parameters, state_bytes=state_bytes, num_devices=num_devices
    )
    if sure > have:
        raise UserError(
            f"{cfg.name} needs {sure:,.0f} bytes ({sure / 1e9:,.1f} GB) on each of {num_devices} "
            f"device(s) for parameters, optimizer state and gradients, each has {have / 1e9:,.1f} "
            f"GB: use more devices with a larger --mesh.fsdp, or {_smaller(have)}"
        )
    line = f"memory: about {estimate / 1e9:.2f} GB of {have / 1e9:.1f} GB per device"
    if estimate > have:
        line += (
            "; this may not fit: if it fails, raise --accumulation, use --model.remat full, "
            f"or {_smaller(have)}"
        )
    return line


def _smaller(have: int) -> str:
    """The largest named experiment that fits one device of `have` bytes."""
    from k3jax.configs import PRESETS, preset
    from k3jax.flops import parameter_counts

    best = "a machine with more memory"
    for name in PRESETS:  # from small to large
        cfg = preset(name)()
        total = parameter_counts(cfg.model).total
        sizes = {"parameters": total, "state_bytes": 9 * total}  # a moment for most, two for some
        if memory_estimate(cfg, **sizes, num_devices=1)[1] > have:
            break
        best = f"the config {name}, the largest that fits"
    return best


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:3]


def _install(asked: str | None) -> str:
    return {"tpu": '"k3jax[tpu]"', "cuda": '"k3jax[cuda]"'}.get(asked or "", "its JAX plugin")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or "no plugin for it is installed"
