"""Command-line flags of a configuration: tyro reads the values, errors are one line each.

A flag is the path of a field: `--steps`, `--model.kda.head-dim`. All values are read first and
put in together, so that the checks of a configuration see the final combination.
"""

import contextlib
import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Iterable
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from k3jax.errors import UserError


class Flag(NamedTuple):
    path: tuple[str, ...]  # field names from the outermost configuration in
    kind: Any  # annotated type
    value: Any  # current value


def overridden[Config](default: Config, args: list[str], program: str) -> Config:
    """`default` with the values that the command line gives.

    Args:
        default: a dataclass whose fields are values or dataclasses again.
        args: `--flag value ...` or `--flag=value`, any number of times; booleans `--x`, `--no-x`.
        program: for messages, for example "k3jax train nano".

    Raises: UserError, one line, that names the flag, the value and what was expected.
    """
    flags = _flags(default)
    changes = {}
    for name, values in _grouped(args, program):
        flag = flags.get(name)
        if flag is None:
            raise UserError(
                f"unknown flag {name}: {nearest(name, flags)} ({program} --help lists all)"
            )
        changes[flag.path] = _value(name, flag, values)
    try:
        return _replaced(default, changes)
    except ValueError as error:
        raise UserError(str(error)) from error


def show_help(default: Any, program: str) -> int:
    """Prints the flags with their types, meanings and current values; returns exit code 0."""
    try:
        tyro.cli(
            type(default),
            default=default,
            args=["--help"],
            prog=program,
            config=(tyro.conf.AvoidSubcommands,),
        )
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def nearest(name: str, known: Iterable[str]) -> str:
    """The valid names closest to a wrong one, as the end of a message."""

    def distance(candidate: str) -> float:
        ends = (candidate.lstrip("-"), candidate.split(".")[-1])
        return max(difflib.SequenceMatcher(None, name.strip("-"), end).ratio() for end in ends)

    best = sorted(known, key=distance, reverse=True)
    close = [candidate for candidate in best[:3] if distance(candidate) >= 0.6]
    if not close:
        return f"valid are {', '.join(best)}" if len(best) < 10 else f"closest is {best[0]}"
    return f"did you mean {' or '.join(close[:1] if distance(close[0]) > 0.8 else close)}?"


def _flags(cfg: Any, path: tuple[str, ...] = ()) -> dict[str, Flag]:
    """All flags by name; a boolean has two, a nested configuration that may be None one."""
    flags = {}
    hints = typing.get_type_hints(type(cfg))
    for field in dataclasses.fields(cfg):
        value, kind, here = getattr(cfg, field.name), hints[field.name], (*path, field.name)
        *outer, last = (part.replace("_", "-") for part in here)
        names = ["--" + ".".join([*outer, last])]
        if kind is bool:
            names.append("--" + ".".join([*outer, f"no-{last}"]))
        if dataclasses.is_dataclass(value):
            flags |= _flags(value, here)
            kind = Literal[None]
            if type(None) not in typing.get_args(hints[field.name]):
                continue
        flags |= {name: Flag(here, kind, value) for name in names}
    return flags


def _grouped(args: list[str], program: str) -> list[tuple[str, list[str]]]:
    """Each flag with the values that follow it."""
    groups: list[tuple[str, list[str]]] = []
    for arg in args:
        if arg.startswith("--"):
            name, equals, value = arg.partition("=")
            groups.append((name.replace("_", "-"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(arg)
        else:
            raise UserError(f"unexpected argument {arg!r}: {program} takes --flag value pairs")
    return groups


def _value(name: str, flag: Flag, values: list[str]) -> Any:
    """The typed value of one flag, read by tyro."""
    given, expected = " ".join(values), _describe(flag.kind)
    if flag.kind is bool and not values:
        return not name.split(".")[-1].lstrip("-").startswith("no-")
    if not values:
        raise UserError(
            f"{name} has no value: expected {expected}; one with a dash is {name}=VALUE"
        )
    if flag.kind is Literal[None]:
        if values == ["None"]:
            return None
        raise UserError(f"{name} {given}: expected None, or flags that start with {name}.")
    named = Annotated[flag.kind, tyro.conf.arg(name="value")]
    holder = dataclasses.make_dataclass("Holder", [("value", named)])
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(holder, args=["--value", *values]).value
    except SystemExit:
        raise UserError(f"{name} {given}: expected {expected}") from None


def _describe(kind: Any) -> str:
    """A type in words."""
    names = {int: "a whole number", float: "a number", str: "text", bool: "no value", None: "None"}
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin in (typing.Union, types.UnionType):
        return " or ".join("None" if part is type(None) else _describe(part) for part in inner)
    if origin is tuple:
        return f"one or more of: {_describe(inner[0])}"
    return names.get(kind, str(kind))


def _replaced(cfg: Any, changes: dict[tuple[str, ...], Any]) -> Any:
    """Innermost first, each configuration built once with all its new values."""
    direct = {path[0]: value for path, value in changes.items() if len(path) == 1}
    for field in dict.fromkeys(path[0] for path in changes if len(path) > 1):
        if field not in direct:
            inner = {path[1:]: v for path, v in changes.items() if path[0] == field}
            direct[field] = _replaced(getattr(cfg, field), inner)
    return dataclasses.replace(cfg, **direct)
