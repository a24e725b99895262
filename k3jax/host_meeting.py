"""How the processes of a run find each other: each comes to process 0 and hears where all are.

Done before JAX joins them, on the same port: there a missing process is not named, and the others
are aborted.
"""

import contextlib
import json
import re
import socket
import time
from typing import Any

from k3jax.errors import UserError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


def meet(address: str, processes: int, me: int, seconds: float) -> dict[int, str]:
    """Waits until all processes are there; returns the host of each.

    Args:
        address: host:port of process 0.
        processes: number of them.
        me: number of this one.
        seconds: limit.

    Raises: UserError, naming who did not come.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + seconds
    if me == 0:
        return _receive(int(port), address, processes, deadline, seconds)
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((host.strip("[]"), int(port)), min(5, left)) as line:
                line.sendall(f"k3jax {me} {socket.gethostname()}\n".encode())
                line.settimeout(max(1, deadline - time.monotonic()) + 10)  # the answer is better
                answer = line.makefile().readline()
            reason = "process 0 ended"
        except OSError as error:
            answer, reason = "", say(error)
        if answer:
            found = json.loads(answer)
            if isinstance(found, str):
                raise UserError(found)
            return dict(enumerate(found))
        if time.monotonic() + 0.2 >= deadline:
            raise UserError(
                f"coordinator {address} did not answer process {me} of {processes} within "
                f"{seconds:.0f} s ({reason}): start process 0 there, and let the port through"
            )
        time.sleep(0.2)


def _receive(
    port: int, address: str, processes: int, deadline: float, seconds: float
) -> dict[int, str]:
    """Process 0's side of `meet`."""
    here: list[tuple[int, str, socket.socket]] = []  # number, host and line of those that came
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        raise UserError(
            f"process 0 cannot open port {port} of {ADDRESS} {address} ({say(error)}): choose "
            "a free port of this host"
        ) from error
    with contextlib.ExitStack() as lines:
        lines.enter_context(server)
        while len({i for i, _, _ in here}) < processes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, min(1.0, deadline - time.monotonic())))
            with contextlib.suppress(OSError):
                line = lines.enter_context(server.accept()[0])
                line.settimeout(5)
                # Anyone may knock at this port, a program of another protocol too.
                said = line.makefile(errors="replace").readline(300)
                said = re.fullmatch(r"k3jax (\d+) (\S+)\n", said)
                if said and 0 < int(said[1]) < processes:
                    here.append((int(said[1]), said[2], line))
            here = [came for came in here if _open(came[2])]
        names = {i: host for i, host, _ in here}
        missing = [i for i in range(1, processes) if i not in names]
        answer: Any = [socket.gethostname(), *(names[i] for i in sorted(names))]
        if len(names) < len(here):
            counted = [i for i, _, _ in here]
            twice = next(i for i in counted if counted.count(i) > 1)
            answer = f"more than one process has {INDEX}={twice}: give each its own, from 0"
        elif missing:
            answer = (
                f"process {_some(missing)} of {processes} did not come to coordinator {address} "
                f"within {seconds:.0f} s: start each with its own {INDEX}, or {COUNT}=1 for one "
                "alone"
            )
        for _, _, line in here:
            with contextlib.suppress(OSError):
                line.sendall(json.dumps(answer).encode() + b"\n")
    if isinstance(answer, str):
        raise UserError(answer)
    return dict(enumerate(answer))


def _open(line: socket.socket) -> bool:
    """Whether the process at the other end is still there."""
    line.setblocking(False)
    try:
        return line.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        line.settimeout(5)


def say(error: BaseException) -> str:
    """An error in a few words."""
    text = " ".join(str(error).split())[:300]
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _some(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
