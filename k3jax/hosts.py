"""Several processes as one run: how they find each other, and how they agree before they compute.

A device program with collectives waits for all processes, and no time-out ends it. So every
process says before each such program whether it can go on (`turn`), over JAX's coordination
service and not over the devices: one process without a batch, with an error or with a signal is
known to all before anything is launched, and one that says nothing is named after a while. Whoever
is in a device program already learns that from threads of its own (`_Watch`). With one process all
of this is a function call.

All processes must call `agree` and what is made of it at the same places of the program.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, NoReturn

from k3jax.errors import UserError
from k3jax.host_meeting import ADDRESS, COUNT, INDEX, meet, say

TIMEOUT_VARIABLE = "K3JAX_HOST_TIMEOUT"
TIMEOUT = 300.0  # seconds that processes wait for each other
STARTING = 6.0  # times that, where one may compile and another find the program in its cache
FAILED = 0.2  # times that, where something has failed already
ROUNDS = 10  # signs of life that a process may leave out
GRACE = 2.0  # seconds that the main thread has to end by itself
ALIVE, LOST = "k3jax/alive/", "k3jax/alive/lost"  # names in the coordination service
LOST_STATUS = 5  # as the command line ends with a LostHost

log = logging.getLogger("k3jax")
_rounds = itertools.count()
_names: dict[int, str] = {}  # host of each process
_told: list[BaseException] = []  # errors that the others know of
_watches: list["_Watch"] = []  # of this process; one, or none if it is alone
_ending = threading.Event()  # the main thread has named the lost process


class HostError(UserError):
    """A process cannot go on, so none does; all of them raise this at the same place."""

    def __init__(self, message: str, *, can_save: bool, mine: Exception | None = None):
        """
        Args:
            message: names the process and the cause.
            can_save: all processes are still there for a checkpoint.
            mine: the error, where it was this process's.
        """
        super().__init__(message)
        self.can_save, self.mine = can_save, mine

    def origin(self) -> Exception:
        """What to raise in the end: a process alone has nobody to explain itself to."""
        return self.mine if self.mine is not None and count() == 1 else self


class LostHost(UserError):
    """A process does not answer. Nothing that waits for it, such as an orderly end, may follow."""


class Turn(NamedTuple):
    """What came of a `turn` to which no process objected."""

    item: Any  # what this process drew; None if `stopped` or `ended`
    stopped: str | None  # the signal, and in a larger run the process that got it
    ended: bool  # no process has more items


def timeout() -> float:
    """Seconds that processes wait for each other."""
    text = os.environ.get(TIMEOUT_VARIABLE, "")
    if not text:
        return TIMEOUT
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds < 1e6:
        raise UserError(f"{TIMEOUT_VARIABLE} is {text!r}; give seconds, at least 1")
    return seconds


def count() -> int:
    """Number of processes of the run; unlike `jax.process_count`, starts no backend."""
    return _state().num_processes


def index() -> int:
    """Number of this process, from 0."""
    return _state().process_id


def name(process: int) -> str:
    """A process in messages."""
    host = _names.get(process)
    return f"process {process} on {host}" if host else f"process {process}"


# ---- start and end


@functools.cache
def connect() -> None:
    """Joins the processes of the run, before a backend is used; does nothing the second time.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID say how; what they leave open is
    taken from the cluster that JAX finds (Cloud TPU, GKE, SLURM, Open MPI, Kubernetes). With
    neither, or with JAX_NUM_PROCESSES=1, this process is alone.

    Raises: UserError, within `timeout()`, naming the variable or process that is missing.
    """
    import jax

    seconds = timeout()
    if jax.distributed.is_initialized():
        return
    given = {variable: os.environ.get(variable) for variable in (ADDRESS, COUNT, INDEX)}
    numbers = {variable: _number(variable, given[variable]) for variable in (COUNT, INDEX)}
    if numbers[COUNT] == 1:
        log.debug("one process: %s is 1", COUNT)
        return
    address, local_devices, why = given[ADDRESS], None, "environment variables"
    if not all(given.values()):
        cluster = _cluster()
        if cluster is not None:
            why = f"cluster {cluster.__name__.removesuffix('Cluster')}"
            try:
                numbers[COUNT] = numbers[COUNT] or cluster.get_process_count()
                if numbers[COUNT] == 1:
                    log.info("one process: %s has no other", why)
                    return
                if numbers[INDEX] is None:
                    numbers[INDEX] = cluster.get_process_id()
                port = os.environ.get("JAX_COORDINATOR_PORT")
                address = address or cluster.get_coordinator_address(int(seconds), port)
                local_devices = cluster.get_local_process_id()
            except (LookupError, RuntimeError, OSError, ValueError, TypeError) as error:
                raise UserError(
                    f"{why} was found, but not the processes of this run ({say(error)}): set "
                    f"{ADDRESS}, {COUNT} and {INDEX}, or {COUNT}=1 to train with this process alone"
                ) from error
        elif not any(given.values()):
            log.debug("one process: no %s, and no cluster was found", ADDRESS)
            return
    missing = [v for v, value in {ADDRESS: address, **numbers}.items() if value is None]
    if missing:
        there = ", ".join(f"{v}={value}" for v, value in given.items() if value)
        raise UserError(
            f"{there} is set, but not {' and '.join(missing)}: set all three for every process"
        )
    processes, me = numbers[COUNT], numbers[INDEX]
    assert address is not None
    assert processes is not None
    assert me is not None
    if me >= processes:
        raise UserError(f"{INDEX} is {me}; with {COUNT}={processes} it must be below that")
    port = re.fullmatch(r".+:(\d{1,5})", address)
    if not port or not 0 < int(port[1]) < 2**16:
        raise UserError(
            f"{ADDRESS} is {address!r}; give host:port, the host of process 0 and a port below 65536"
        )
    _names.update(meet(address, processes, me, seconds))
    # The service's own handler of SIGTERM would take the place of ours (`stop_signal.py`).
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            address,
            processes,
            me,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(seconds) + 1,
            # JAX ends the process without naming the lost one, and where the coordinator is stopped
            # perhaps after half of this: the watch is to be first. It cannot where Python is stuck.
            heartbeat_timeout_seconds=int(3 * _limit()) + 20,
            shutdown_timeout_seconds=int(seconds) + 1,
        )
    except RuntimeError as error:
        raise UserError(
            f"process {me} of {processes} cannot join {address}: {say(error)}"
        ) from error
    log.info("%s of %d, coordinator %s (from %s)", name(me), processes, address, why)
    _Watch(_state().client, _limit()).start()


def disconnect() -> None:
    """Waits for the other processes and leaves; nothing can be computed together after this."""
    import jax

    jax.distributed.shutdown()


def end_alone(code: int) -> NoReturn:
    """Ends this process at once: an orderly end would wait for the one that is lost."""
    _ending.set()
    if index() == 0:  # with it goes the service that tells the others; JAX then aborts them
        time.sleep(_limit() / ROUNDS + 2 * GRACE)
    os._exit(code)


def _number(variable: str, text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or (variable == COUNT and int(text) == 0):
        raise UserError(f"{variable} is {text!r}; give a number")
    return int(text)


def _cluster() -> Any:
    """The kind of cluster that JAX finds itself in, or None."""
    from jax._src import clusters  # public JAX tells it only by joining, which waits for the others

    kinds = [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
    for kind in kinds:
        try:
            if kind.is_env_present():
                return kind
        except Exception as error:  # noqa: BLE001  of any library that such a cluster needs
            log.warning("cluster %s cannot be asked (%s): not used", kind.__name__, say(error))
    return None


# ---- signs of life


class _Watch:
    """Ends this process, with one line, when another gives no sign of life for `limit` seconds.

    The main thread cannot: it may be in a device program that waits for the lost process. There
    are two threads, for the one that asks the coordinator waits without end if that is stopped.
    Time is counted in rounds of this process, so that one that was itself stopped accuses nobody.
    A process that waits in `disconnect` gives its signs until all are there.
    """

    def __init__(self, client: Any, limit: float):
        self.client, self.limit, self.pause = client, limit, limit / ROUNDS
        self.round, self.heard = 0, dict.fromkeys(range(count()), 0)  # the round of the last sign
        self.words, self.told = "", threading.Event()  # what another process found

    def start(self) -> None:
        _watches.append(self)
        for work in (self.speak, self.judge):
            threading.Thread(target=work, name=f"k3jax {work.__name__}", daemon=True).start()

    def over(self) -> bool:
        """Whether the processes have parted."""
        return _state().client is not self.client

    def silent(self, rounds: int) -> list[int]:
        """Processes without a sign of life for more than that many rounds."""
        return [i for i, heard in self.heard.items() if self.round - heard > rounds]

    def speak(self) -> None:
        """Says that this process lives and listens to the others, until they part."""
        said: dict[int, str] = {}
        for number in itertools.count():
            try:
                self.client.key_value_set(f"{ALIVE}{index()}", str(number), allow_overwrite=True)
                found = dict(self.client.key_value_dir_get(ALIVE))
            except _jax_error():
                found = {}  # the next round shows whether it was for good
            if self.over():
                return
            if LOST in found:
                self.words = found.pop(LOST)
                self.told.set()
                return
            for process, text in ((int(key.rpartition("/")[2]), found[key]) for key in found):
                if text != said.get(process):
                    said[process], self.heard[process] = text, self.round
            time.sleep(self.pause)

    def judge(self) -> None:
        """Counts the rounds of silence, and ends this process when there are too many."""
        while not self.told.wait(self.pause):
            if self.over():
                return
            self.round += 1
            if late := self.silent(ROUNDS):
                if index() in self.silent(ROUNDS // 2):  # nobody's signs get through
                    late = [0]
                self.words = _unanswered(late, self.limit)
                # A thread, for this too waits without end where the coordinator is stopped.
                tell = threading.Thread(target=_tell, args=(self.client, self.words), daemon=True)
                tell.start()
                break
        if not _ending.wait(GRACE) and not self.over():
            log.error("%s", self.words)
            end_alone(LOST_STATUS)


def _limit() -> float:
    """Seconds without a sign of life; an import alone can keep a thread from it for some."""
    return max(10.0, timeout())


def _unanswered(late: list[int], seconds: float) -> str:
    return (
        f"{', '.join(map(name, late)) or 'a process'} did not answer within {seconds:.0f} s: the "
        f"checkpoints are intact, start again ({TIMEOUT_VARIABLE} sets the time)"
    )


def _tell(client: Any, words: str) -> None:
    """Ends those that are in a device program too, with the same words."""
    with contextlib.suppress(_jax_error()):  # another was first
        client.key_value_set(LOST, words)


# ---- agreement


def agree(word: str = "", *, patience: float = 1.0) -> dict[int, str]:
    """What each process has to say here; empty if none has anything to say.

    Args:
        word: of this process.
        patience: times the usual `timeout()`.

    Raises: LostHost naming the processes that did not get here in time. Cost: two messages to
        process 0, about 1 ms; the devices go on meanwhile.
    """
    if count() == 1:
        return {0: word} if word else {}
    client, folder = _state().client, f"k3jax/{next(_rounds)}"
    if word:
        client.key_value_set(f"{folder}/{index()}", word)
    _wait(client, folder, timeout() * patience)
    try:
        said = client.key_value_dir_get(f"{folder}/")
    except _jax_error() as error:
        raise LostHost(f"{name(0)}, the coordinator, is gone: {say(error)}") from error
    return {int(key.rpartition("/")[2]): text for key, text in sorted(said)}


def turn(draw: Callable[[], Any], stop: str | None = None, *, patience: float = 1.0) -> Turn:
    """`draw()` on every process, once all know that it went well on all.

    Args:
        draw: local work; StopIteration says that there is nothing more.
        stop: signal that asked this process to stop, if one did.
        patience: times the usual `timeout()`.

    Raises: HostError if it failed on a process, or ended on some only; LostHost.
    """
    item, word, mine = None, "", None
    try:
        item = draw()
    except StopIteration:
        word = "end"
    except Exception as error:  # noqa: BLE001  whatever it is, the others must hear of it
        mine, word = error, f"error {say(error)}"
    if stop and not word.startswith("error"):
        word = f"stop {stop}"
    said = agree(word, patience=patience)
    _object(said, mine)
    ended = [process for process, what in said.items() if what == "end"]
    stops = [(process, what[5:]) for process, what in said.items() if what.startswith("stop ")]
    if stops:
        process, signal = stops[0]
        return Turn(None, signal if count() == 1 else f"{signal} of {name(process)}", False)
    if ended and len(ended) < count():
        raise HostError(f"{name(ended[0])} has no more data, others have", can_save=True)
    return Turn(item, None, bool(ended))


def together(work: Callable[[], Any]) -> Any:
    """The result of local work; if it fails on one process, all raise."""
    try:
        return turn(work, patience=STARTING).item
    except HostError as error:
        raise error.origin() from error.mine


def same(what: str, value: Any) -> None:
    """Raises HostError if the processes do not have the same `value` of `what`."""
    said = agree(f"have {value}", patience=STARTING)
    _object(said, None)
    others = [process for process, text in said.items() if text != said[0]]
    if others:
        first, other = said[0].removeprefix("have "), said[others[0]].removeprefix("have ")
        raise HostError(
            f"{name(0)} has {what} {first}, {name(others[0])} has {other}: start all with the "
            "same command, and keep data and run folder where all see the same",
            can_save=False,
        )


@contextlib.contextmanager
def announced() -> Generator[None]:
    """An error that leaves the block is told to the processes that do not have it themselves.

    Raises: LostHost in place of a failed device program, if that is because a process is gone.
    """
    try:
        yield
    except (HostError, LostHost):
        raise
    except BaseException as error:
        if count() > 1 and error not in _told:
            _told.append(error)
            try:
                agree(f"gone {say(error)}", patience=FAILED)
            except LostHost as lost:
                if isinstance(error, _jax_error()):
                    raise lost from error
        raise


def _object(said: dict[int, str], mine: Exception | None) -> None:
    """Raises HostError if a process said that it failed."""
    failed = [(process, *what.split(" ", 1)) for process, what in said.items()]
    failed = [found for found in failed if found[1] in ("error", "gone")]
    if failed:
        if mine is not None and count() > 1 and not isinstance(mine, UserError):
            log.error("%s", "".join(traceback.format_exception(mine)).rstrip())
        process, _, cause = failed[0]
        raise HostError(
            f"{name(process)} stopped the run: {cause}",
            can_save=all(kind == "error" for _, kind, _ in failed),
            mine=mine,
        ) from mine


def _wait(client: Any, folder: str, seconds: float) -> None:
    """Returns when all processes are here; says now and then for which ones it waits."""
    began, step = time.monotonic(), max(1.0, seconds / 10)
    for attempt in itertools.count():
        left = began + seconds - time.monotonic()
        # The same barrier every time, for the service forgets none; but once it has failed, one
        # that comes later fails too, and a process that missed two of one name is refused for good.
        barrier = f"{folder}/{attempt}" if attempt else "k3jax"
        try:
            client.wait_at_barrier(barrier, max(1, int(1000 * min(step, left))))
        except _jax_error() as error:
            waited = time.monotonic() - began
            late = _late(str(error))
            if "DEADLINE_EXCEEDED" not in str(error):
                lost = re.search(r"[Tt]ask:? ?(\d+)", str(error))
                who = name(int(lost[1])) if lost else f"{name(0)}, the coordinator,"
                raise LostHost(
                    f"{who} is gone ({say(error)}): the checkpoints are intact, start again"
                ) from error
            if left <= step:
                # Others may be late because they wait for the lost one in a device program.
                silent = {i for watch in _watches for i in watch.silent(ROUNDS // 2)}
                words = _unanswered([i for i in late if i in silent] or late, waited)
                if seconds >= timeout():  # a shorter wait does not prove much
                    _tell(client, words)
                raise LostHost(words) from error
            if index() not in late:  # else the others gave up the wait before this one came
                log.warning("waited %.0f s for %s", waited, ", ".join(map(name, late)))
        else:
            return


def _late(message: str) -> list[int]:
    """Processes that a failed barrier waited for (jaxlib 0.12: one number per line)."""
    _, _, listed = message.partition("timed out task names:")
    return [int(number) for number in re.findall(r"^(?:/job:\S+task:)?(\d+)$", listed, re.M)]


def _state() -> Any:
    """JAX's connection: the public functions neither wait with a limit nor say who is missing."""
    from jax._src import distributed

    return distributed.global_state


def _jax_error() -> type[Exception]:
    import jax

    return jax.errors.JaxRuntimeError
