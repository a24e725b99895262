"""The command `k3jax`: train, generate, eval, plan, tokenizer, import, export, inspect, conformance,
configs, check.

Exit codes: 0 done; 1 not conforming, or the reader of a pipe has gone; 2 bad input (one line, nothing written); 3 training stopped because loss or
gradient stayed not finite; 4 nothing left to train; 5 another process of the run is gone; 130
aborted by a second Ctrl-C.
JAX is loaded after the sub-command, the config's name and the versions are known to be good.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from k3jax.errors import UserError
from k3jax.flags import nearest, overridden, show_help

if TYPE_CHECKING:
    from k3jax.configs.experiment import ExperimentConfig

DIFFERS, UNREAD, BAD_INPUT, ABORTED = 1, 1, 2, 130  # 1 is also what rich ends with if unread

USAGE = """usage: k3jax COMMAND ...

  k3jax train CONFIG [--FLAG VALUE ...]      train, or continue, a named configuration
  k3jax generate MODEL_DIR --prompt TEXT     text from a trained or imported model, also chats, files
  k3jax eval --run-dir DIR [--data PATH]     its loss and bits per byte
  k3jax plan CONFIG --topology NAME ...      will it fit a slice of TPUs, and how fast is it
  k3jax tokenizer --size N --out FILE.model  a vocabulary from your text, for small models
  k3jax import FOLDER MODEL_DIR              a released checkpoint as a model to generate from, or train
  k3jax export MODEL_DIR FOLDER              a model or run as a checkpoint in the released layout
  k3jax inspect FOLDER                       what a checkpoint of safetensors files holds
  k3jax conformance make|check FOLDER        tiny checkpoints and the numbers they give, for any implementation
  k3jax configs [NAME]                       what the named configurations are
  k3jax check                                whether the installed versions fit together

Each command has --help. CONFIG is a model folder, or one of: {configs}."""


@dataclass(frozen=True, kw_only=True)
class TokenizerArgs:
    size: int = 4096  # ids in all, with K3's 256 special tokens
    out: str | None = None  # file to write, *.model or *.tiktoken
    data: str | None = None  # file, folder or glob; None: the standard library of Python


def main(args: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    from k3jax.display import show_logs

    show_logs()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # of what a terminal cannot show
    try:
        status = _dispatch(list(sys.argv[1:] if args is None else args))
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"k3jax: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python writes what is left once more when it ends
        if error.errno == errno.EPIPE:
            return UNREAD
        full = f"output not written: {error.strerror}; free some space and start again"
        print(f"k3jax: {full}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("k3jax: aborted", file=sys.stderr)
        return ABORTED


def _dispatch(args: list[str]) -> int:
    from k3jax.configs import PRESETS

    commands = {
        "train": _train,
        "generate": _generate,
        "eval": _eval,
        "plan": _plan,
        "tokenizer": _tokenizer,
        "import": _import,
        "export": _export,
        "inspect": _inspect,
        "conformance": _conformance,
        "configs": _configs,
        "check": _check,
    }
    if not args or args[0] in ("-h", "--help"):
        print(USAGE.format(configs=", ".join(PRESETS)), file=sys.stdout if args else sys.stderr)
        return 0 if args else BAD_INPUT
    if args[0] not in commands:
        raise UserError(f"unknown command {args[0]!r}: {nearest(args[0], commands)}")
    return commands[args[0]](args[1:])


def _train(args: list[str]) -> int:
    from k3jax.configs import PRESETS

    if not args or args[0] in ("-h", "--help"):
        out = sys.stdout if args else sys.stderr
        print("usage: k3jax train CONFIG [--FLAG VALUE ...]; CONFIG is one of:", *PRESETS, file=out)
        print("`k3jax train CONFIG --help` lists the flags of a configuration", file=out)
        return 0 if args else BAD_INPUT
    default = _preset(args[0])
    if _wants_help(args):
        return show_help(default, f"k3jax train {args[0]}")
    cfg = overridden(default, args[1:], f"k3jax train {args[0]}")
    from k3jax import devices, hosts

    hosts.connect()
    try:
        with hosts.announced():
            devices.start_backend(cfg.platform)  # an absent one is refused before slower imports
        from k3jax.train import train

        return train(cfg)
    except hosts.LostHost as error:
        print(f"k3jax: {error}", file=sys.stderr, flush=True)
        hosts.end_alone(hosts.LOST_STATUS)
    finally:
        hosts.disconnect()


def _import(args: list[str]) -> int:
    from k3jax.import_official import ImportArgs, import_model

    if _wants_help(args):
        return show_help(ImportArgs(), "k3jax import SOURCE MODEL_DIR")
    source, target = _two(args, "k3jax import SOURCE MODEL_DIR")
    asked = overridden(ImportArgs(), args[2:], "k3jax import")
    return _with_hosts(asked.platform, lambda: import_model(source, target, asked))


def _export(args: list[str]) -> int:
    from k3jax.export_official import ExportArgs, export_model

    if _wants_help(args):
        return show_help(ExportArgs(), "k3jax export MODEL_DIR FOLDER")
    model, target = _two(args, "k3jax export MODEL_DIR FOLDER")
    asked = overridden(ExportArgs(), args[2:], "k3jax export")
    return _with_hosts(asked.platform, lambda: export_model(model, target, asked.step))


def _two(args: list[str], usage: str) -> list[str]:
    """The two folders that the arguments begin with."""
    if len(args) < 2 or any(arg.startswith("-") for arg in args[:2]):
        raise UserError(f"two folders are needed first: {usage}")
    return args[:2]


def _with_hosts(platform: str | None, work: Callable[[], int], *, alone: str | None = "cpu") -> int:
    """Runs `work` on every process of the run, which ends if one is lost.

    A process by itself uses the platform `alone` if none is asked for; several say with their devices
    which part is whose.
    """
    from k3jax import devices, hosts

    devices.check_versions()
    hosts.connect()
    try:
        with hosts.announced():
            _start(platform or (alone if hosts.count() == 1 else None))
            return work()
    except hosts.LostHost as error:
        print(f"k3jax: {error}", file=sys.stderr, flush=True)
        hosts.end_alone(hosts.LOST_STATUS)
    finally:
        hosts.disconnect()


def _plan(args: list[str]) -> int:
    from k3jax.configs import PRESETS

    if not args or args[0] in ("-h", "--help"):
        out = sys.stdout if args else sys.stderr
        print(
            "usage: k3jax plan CONFIG --topology NAME [--batch-tokens N] [--FLAG VALUE ...]",
            file=out,
        )
        print("CONFIG is one of:", *PRESETS, file=out)
        print("`k3jax plan CONFIG --help` lists the flags of a configuration", file=out)
        return 0 if args else BAD_INPUT
    default = _preset(args[0], "plan")
    from k3jax import devices

    devices.start_backend("cpu")  # an accelerator that may be here is not needed
    from k3jax import plan

    if _wants_help(args):
        return show_help(plan.request(default), f"k3jax plan {args[0]}")
    return plan.plan(overridden(plan.request(default), args[1:], f"k3jax plan {args[0]}"))


def _preset(name: str, command: str = "train") -> "ExperimentConfig":
    """The named configuration, or that of a model folder, once name and versions are known to be good."""
    from k3jax.configs import PRESETS, preset
    from k3jax.devices import check_versions

    if name.startswith("-"):
        raise UserError(f"flag {name} comes before the config: k3jax {command} CONFIG {name} ...")
    if name in PRESETS:
        check_versions()
        return preset(name)()
    if os.path.isdir(Path(name).expanduser()):  # unlike Path.is_dir, also for too long a name
        check_versions()
        from k3jax.initial_state import training_config

        return training_config(name)
    raise UserError(f"unknown config {name!r}: {nearest(name, PRESETS)}")


def _generate(args: list[str]) -> int:
    from k3jax.generate_command import GenerateArgs, check_args, generate

    if _wants_help(args):
        return show_help(GenerateArgs(), "k3jax generate MODEL_DIR")
    if not args or args[0].startswith("-"):
        raise UserError("which model? k3jax generate MODEL_DIR --prompt TEXT")
    asked = overridden(GenerateArgs(), args[1:], "k3jax generate MODEL_DIR")
    check_args(asked)
    return _with_hosts(asked.platform, lambda: generate(asked, args[0]), alone=None)


def _eval(args: list[str]) -> int:
    from k3jax.eval_command import EvalArgs, check_args, evaluate_model

    if _wants_help(args):
        return show_help(EvalArgs(), "k3jax eval")
    asked = overridden(EvalArgs(), args, "k3jax eval")
    check_args(asked)
    return _with_hosts(asked.platform, lambda: evaluate_model(asked), alone=None)


def _start(platform: str | None) -> None:
    """The versions and the backend that a command needs, once they are known to be there."""
    from k3jax import devices

    devices.check_versions()
    if platform not in (None, "cpu", "cuda", "tpu"):
        raise UserError(f"platform is {platform!r}; use cpu, cuda or tpu")
    devices.start_backend(platform)
    devices.use_compilation_cache()


def _tokenizer(args: list[str]) -> int:
    if _wants_help(args):
        return show_help(TokenizerArgs(), "k3jax tokenizer")
    asked = overridden(TokenizerArgs(), args, "k3jax tokenizer")
    if asked.out is None:
        raise UserError("where to? give --out FILE.model")
    from pathlib import Path

    from k3jax.data.bpe_training import check_output, train_bpe, write_ranks
    from k3jax.data.text import load_corpus

    out = Path(asked.out).expanduser()
    check_output(out)
    corpus = load_corpus(asked.data)
    print(corpus.describe(), flush=True)
    write_ranks(train_bpe(corpus, asked.size), out)
    print(f"{out}: {asked.size:,} ids; use --tokenizer {out} --model.vocab-size {asked.size}")
    return 0


def _inspect(args: list[str]) -> int:
    release = args[:1] == ["--release"]
    folders = args[1:] if release else args
    if not args or _wants_help(args):
        out = sys.stdout if args else sys.stderr
        print("usage: k3jax inspect FOLDER_OR_URL    audits a checkpoint by its headers", file=out)
        print(
            "       k3jax inspect --release FOLDER   writes the headers of the released Kimi K3 "
            "to a new folder (130 MB, no weights) and audits those",
            file=out,
        )
        return 0 if args else BAD_INPUT
    if len(folders) != 1 or folders[0].startswith("-"):
        found = " ".join(folders) or "none"
        raise UserError(f"k3jax inspect takes one folder, not {found!r}")
    from rich.console import Console

    from k3jax.inspection import inspect, inspect_release

    (inspect_release if release else inspect)(folders[0], Console())
    return 0


def _conformance(args: list[str]) -> int:
    if not args or _wants_help(args):
        out = sys.stdout if args else sys.stderr
        print("usage: k3jax conformance make FOLDER      writes the kit to a new folder", file=out)
        print(
            "       k3jax conformance check FOLDER [--results FOLDER]   compares k3jax, or the results "
            "of another implementation, with a kit; its README.md says how",
            file=out,
        )
        return 0 if args else BAD_INPUT
    action, *rest = args
    if action not in ("make", "check"):
        raise UserError(f"k3jax conformance knows make and check, not {action!r}")
    if not rest or rest[0].startswith("-"):
        raise UserError(f"which folder? k3jax conformance {action} FOLDER")
    results = None
    if rest[1:]:
        if action == "make" or len(rest) != 3 or rest[1] != "--results":
            raise UserError(f"unexpected arguments {' '.join(rest[1:])!r} of conformance {action}")
        results = rest[2]
    from k3jax import devices

    devices.check_versions()
    devices.start_backend("cpu" if action == "make" else None)
    devices.use_compilation_cache()
    from k3jax import conformance

    if action == "make":
        conformance.make(rest[0])
        print(f"kit written: begin with {rest[0]}/README.md")
        return 0
    lines = conformance.check(rest[0], results)
    conformance.show(lines)
    return 0 if all(line.passed for line in lines) else DIFFERS


def _configs(args: list[str]) -> int:
    from k3jax.configs import PRESETS

    if _wants_help(args):
        print("usage: k3jax configs [NAME]; NAME is one of:", *PRESETS)
        return 0
    if len(args) > 1:
        raise UserError(f"unexpected argument {args[1]!r}: k3jax configs takes one name at most")
    cfg = _preset(args[0]) if args else None
    from rich.console import Console

    from k3jax.summary import config_table, presets_table

    Console().print(presets_table() if cfg is None else config_table(cfg))
    return 0


def _check(args: list[str]) -> int:
    """Versions only: a wrong plugin crashes the process as soon as a backend starts."""
    from k3jax.devices import check_versions, installed

    if args:
        raise UserError(f"unexpected argument {args[0]!r}: k3jax check takes none")
    for name, version in installed().items():
        print(f"{name} {version}")
    check_versions()
    print("these versions fit together")
    return 0


def _wants_help(args: list[str]) -> bool:
    return "-h" in args or "--help" in args


if __name__ == "__main__":
    sys.exit(main())
