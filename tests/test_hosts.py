"""Several processes on this machine: start-up, agreement, failures of one, other numbers of them."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from k3jax import checkpoint, host_meeting, hosts
from k3jax.errors import UserError
from tests.tiny_run import TINY, records, text_folder

PATIENCE = 900  # seconds for one run, on a busy machine


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Group:
    """Processes of one run, each with its own output."""

    def __init__(self, programs: list[list[str]], *, devices: int = 1, **env: str):
        port = free_port()
        self.processes = []
        for rank, program in enumerate(programs):
            flags = f"--xla_force_host_platform_device_count={devices}"
            mine = {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"{flags} --xla_backend_optimization_level=0",
                "K3JAX_HOST_TIMEOUT": "120",
                "K3JAX_CACHE_DIR": "",
                **env,
            }
            if len(programs) > 1:
                mine[hosts.ADDRESS] = f"localhost:{port}"
                mine[hosts.COUNT], mine[hosts.INDEX] = str(len(programs)), str(rank)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            self.processes.append(
                subprocess.Popen([sys.executable, *program], env=os.environ | mine, **pipes)
            )

    def wait(self) -> list[tuple[int, str]]:
        """Exit code and output of each."""
        found: list[tuple[int, str]] = [(-1, "")] * len(self.processes)

        def collect(rank, process):
            out, err = process.communicate(timeout=PATIENCE)
            found[rank] = process.returncode, out + err

        threads = [
            threading.Thread(target=collect, args=each) for each in enumerate(self.processes)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            for process in self.processes:
                process.kill()
        return found


def script(text: str, *args) -> list[str]:
    return ["-c", textwrap.dedent(text), *map(str, args)]


def succeeded(found: list[tuple[int, str]]) -> list[str]:
    for code, output in found:
        assert code == 0, output[-4000:]
    return [output for _, output in found]


# ---- start-up


@pytest.fixture
def alone(monkeypatch):
    """No variable of a run, and a start that was not made yet."""
    for variable in (hosts.ADDRESS, hosts.COUNT, hosts.INDEX, hosts.TIMEOUT_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    hosts.connect.cache_clear()
    yield monkeypatch
    hosts.connect.cache_clear()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({hosts.ADDRESS: "a:1"}, "not JAX_NUM_PROCESSES and JAX_PROCESS_ID: set all three"),
        ({hosts.COUNT: "2", hosts.INDEX: "0"}, "not JAX_COORDINATOR_ADDRESS: set all three"),
        ({hosts.ADDRESS: "a:1", hosts.COUNT: "2"}, "is set, but not JAX_PROCESS_ID"),
        ({hosts.ADDRESS: "a:1", hosts.COUNT: "two", hosts.INDEX: "0"}, "PROCESSES is 'two'"),
        ({hosts.ADDRESS: "a:1", hosts.COUNT: "0", hosts.INDEX: "0"}, "PROCESSES is '0'"),
        ({hosts.ADDRESS: "a:1", hosts.COUNT: "2", hosts.INDEX: "-1"}, "PROCESS_ID is '-1'"),
        ({hosts.ADDRESS: "a:1", hosts.COUNT: "2", hosts.INDEX: "2"}, "it must be below that"),
        ({hosts.ADDRESS: "a", hosts.COUNT: "2", hosts.INDEX: "0"}, "is 'a'; give host:port"),
        ({hosts.ADDRESS: "a:70000", hosts.COUNT: "2", hosts.INDEX: "1"}, "a port below 65536"),
        ({hosts.COUNT: "2", hosts.TIMEOUT_VARIABLE: "soon"}, "K3JAX_HOST_TIMEOUT is 'soon'"),
        ({hosts.TIMEOUT_VARIABLE: "0"}, "K3JAX_HOST_TIMEOUT is '0'"),  # alone too
    ],
)
def test_wrong_or_missing_variables_are_named(alone, given, words):
    alone.setattr(hosts, "_cluster", lambda: None)
    for variable, value in given.items():
        alone.setenv(variable, value)
    with pytest.raises(UserError) as error:
        hosts.connect()
    assert words in str(error.value)
    assert "\n" not in str(error.value)


class Cluster:
    """A cluster as JAX describes one."""

    size = 1

    @classmethod
    def get_process_count(cls):
        return cls.size

    @classmethod
    def get_process_id(cls):
        raise KeyError("SLURM_PROCID")


def test_one_process_without_or_with_a_cluster_joins_nothing(alone):
    for cluster in (None, Cluster):
        alone.setattr(hosts, "_cluster", lambda cluster=cluster: cluster)
        hosts.connect.cache_clear()
        hosts.connect()
        assert (hosts.count(), hosts.index()) == (1, 0)


def test_a_cluster_that_hides_its_processes_is_named_with_the_way_out(alone):
    alone.setattr(Cluster, "size", 4)
    alone.setattr(hosts, "_cluster", lambda: Cluster)
    with pytest.raises(UserError, match=r"KeyError: 'SLURM_PROCID'.*JAX_NUM_PROCESSES=1 to train"):
        hosts.connect()


def test_jax_finds_slurm(alone):
    """Through JAX's own detection, up to the process that is missing."""
    variables = {"JOB_ID": "7", "STEP_NODELIST": "localhost", "NTASKS": "2", "PROCID": "0"}
    for name, value in {**variables, "LOCALID": "0"}.items():
        alone.setenv(f"SLURM_{name}", value)
    alone.setenv("JAX_COORDINATOR_PORT", str(port := free_port()))
    alone.setenv(hosts.TIMEOUT_VARIABLE, "1")
    with pytest.raises(UserError, match=f"process 1 of 2 did not come .*localhost:{port} within 1"):
        hosts.connect()


def test_a_stranger_at_the_port_is_ignored():
    """Such as a client of an earlier run, which speaks another protocol."""
    address = f"localhost:{free_port()}"
    found: list[dict] = []
    first = threading.Thread(target=lambda: found.append(host_meeting.meet(address, 2, 0, 30.0)))
    first.start()
    host, port = address.split(":")
    while first.is_alive():
        try:
            with socket.create_connection((host, int(port)), 5) as line:
                line.sendall(b"PRI * HTTP/2.0\xff\xfe\x00\n")
            break
        except ConnectionRefusedError:  # not open yet
            time.sleep(0.05)
    found.append(host_meeting.meet(address, 2, 1, 30.0))
    first.join()
    assert [sorted(names) for names in found] == [[0, 1], [0, 1]]


def meet(count: int, ranks: list[int], seconds: float) -> dict[int, list]:
    """What `meet` gives or raises for processes of one start-up, as threads."""
    address, found = f"localhost:{free_port()}", {rank: [] for rank in ranks}

    def one(rank):
        try:
            found[rank].append(host_meeting.meet(address, count, rank, seconds))
        except UserError as error:
            found[rank].append(str(error).replace(address, "ADDRESS"))

    threads = [threading.Thread(target=one, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_all_who_come_are_told_who_is_missing():
    for answers in meet(4, [0, 1, 3], 2.0).values():
        for answer in answers:
            assert answer.startswith("process 2 of 4 did not come to coordinator ADDRESS within 2")
    everyone = dict.fromkeys(range(3), socket.gethostname())
    assert all(answers == [everyone] for answers in meet(3, [2, 0, 1], 60.0).values())


def test_a_number_given_twice_is_named():
    for answers in meet(3, [0, 1, 1], 2.0).values():
        for answer in answers:
            assert answer == "more than one process has JAX_PROCESS_ID=1: give each its own, from 0"


def test_an_absent_coordinator_is_named():
    ((answer,),) = meet(2, [1], 1.0).values()
    assert answer.startswith("coordinator ADDRESS did not answer process 1 of 2 within 1 s")


def test_strangers_at_the_port_are_ignored():
    address, found = f"localhost:{(port := free_port())}", []
    first = threading.Thread(target=lambda: found.append(host_meeting.meet(address, 2, 0, 60.0)))
    first.start()
    for words in (b"GET / HTTP/1.1\n", b"k3jax 7 elsewhere\n", b"k3jax 0 elsewhere\n", b""):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("localhost", port), 5) as line:
                    line.sendall(words)
                break
            except OSError:
                time.sleep(0.05)
    assert not found
    assert host_meeting.meet(address, 2, 1, 60.0) == {
        0: socket.gethostname(),
        1: socket.gethostname(),
    }
    first.join()
    assert len(found) == 1


# ---- agreement


def test_one_process_agrees_with_itself():
    assert hosts.agree() == {}
    assert hosts.turn(lambda: 5) == hosts.Turn(5, None, False)
    assert hosts.turn(lambda: 5, "SIGTERM").stopped == "SIGTERM"
    assert hosts.turn(lambda: next(iter(()))).ended
    hosts.same("anything", 3)
    with pytest.raises(hosts.HostError) as error:
        hosts.turn(lambda: 1 // 0)
    assert isinstance(error.value.origin(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        hosts.together(lambda: 1 // 0)


def test_the_message_of_a_failed_barrier_is_understood():
    text = "DEADLINE: late.\nThe first task at the barrier: 0. Some timed out task names:\n3\n11\n\nRPC"
    assert hosts._late(text) == [3, 11]
    assert hosts._late(text.replace("3\n", "/job:jax_worker/replica:0/task:3\n")) == [3, 11]
    assert hosts._late("INTERNAL: another") == []


TWO = """
    import os, signal, sys, time
    from pathlib import Path
    from k3jax.display import show_logs
    show_logs()
    from k3jax import hosts
    hosts.connect()
    hosts.connect()
    import grain
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from k3jax.checkpoint import CheckpointWriter, restore, restore_numpy
    from k3jax.data.packing import join_positions
    from k3jax.sharding.mesh import MeshConfig, batch_sharding, make_mesh
    from k3jax.stop_signal import StopSignal
    from k3jax.train import _rows_here

    rank = hosts.index()
    assert (hosts.count(), jax.process_count(), jax.process_index()) == (2, 2, rank)

    def fails(function, words, can_save):
        try:
            function()
        except hosts.HostError as error:
            assert words in str(error), error
            assert error.can_save == can_save
        else:
            raise AssertionError(words)

    # KF-115: host 0 has 5 batches, host 1 has 4; then one that raises
    batches, seen = iter(range(5 - rank)), []
    def draw():
        seen.append(hosts.turn(lambda: next(batches)).item)
    fails(lambda: [draw() for _ in range(9)], "process 1 on", True)
    assert seen == [0, 1, 2, 3]
    fails(lambda: hosts.turn(lambda: 1 // (1 - rank)), "ZeroDivisionError: integer", True)
    assert hosts.turn(lambda: rank).item == rank
    fails(lambda: hosts.same("data", rank), "has data 0, process 1 on", False)
    hosts.same("data", "one")
    def leave():
        with hosts.announced():
            if rank == 1:
                raise KeyError("disk")
            hosts.turn(lambda: 1)
    if rank == 0:
        fails(leave, "KeyError: 'disk'", False)
    else:
        try:
            leave()
        except KeyError:
            pass

    with StopSignal() as stop:
        assert hosts.turn(lambda: 1, stop.name).stopped is None
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        stopped = hosts.turn(lambda: 1, stop.name).stopped
        assert stopped.startswith("SIGTERM of process 1"), stopped

    # a late process is waited for, and named while it is
    if rank == 1:
        time.sleep(8)
    assert hosts.agree() == {}

    # rows that a process holds, where rows, tokens or neither lie on several processes
    def rows(**sizes):
        return _rows_here(batch_sharding(make_mesh(MeshConfig(**sizes))), (2, 4, 8))
    assert rows() == ([[0, 1, 4, 5], [2, 3, 6, 7]][rank],) * 2
    everything = list(range(8))
    assert rows(context=4, data=1) == (everything, [everything, []][rank])
    assert rows(tensor=2, data=2)[0] == [[0, 1, 4, 5], [2, 3, 6, 7]][rank]

    # a checkpoint: each process writes and reads its part (KF-083, KF-111)
    mesh = make_mesh(MeshConfig(data=1, fsdp=4))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    x = jax.make_array_from_callback(whole.shape, split, whole.__getitem__)
    data = iter(grain.MapDataset.range(9).to_iter_dataset())
    for _ in range(rank + 1):
        next(data)
    with CheckpointWriter(Path(sys.argv[1]), keep_last=1) as writer:
        writer.save(1, {"x": x}, data, {})
    for spec in (PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec()):
        target = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        found = restore(Path(sys.argv[1]), {"x": target})
        for shard in found.state["x"].addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    positions = []
    for saved in found.data:
        data.set_state(saved)
        positions.append(next(data))
    assert positions == [1, 2]
    np.testing.assert_array_equal(restore_numpy(Path(sys.argv[1]))["x"], whole)
    hosts.disconnect()
    print("passed", flush=True)
"""


def test_kf_111_kf_115_two_processes_agree_and_save(tmp_path):
    program = script(TWO, tmp_path / "checkpoints")
    outputs = succeeded(Group([program] * 2, devices=2, K3JAX_HOST_TIMEOUT="60").wait())
    assert all("passed" in output for output in outputs)
    assert re.search(r"process 0 on .* of 2, coordinator localhost:\d+ \(from env", outputs[0])
    assert re.search(r"warning: waited \d s for process 1 on", outputs[0])
    assert "waited" not in outputs[1]
    assert "ZeroDivisionError" in outputs[1].split("Traceback")[1]
    assert "Traceback" not in outputs[0]
    arrays = checkpoint.restore_numpy(tmp_path / "checkpoints")
    np.testing.assert_array_equal(arrays["x"].ravel(), np.arange(32))


# ---- signs of life


class Service:
    """Enough of a coordination service for one process; `others` are the signs of the others."""

    def __init__(self, others: dict[str, str]):
        self.held = {hosts.ALIVE + process: text for process, text in others.items()}
        self.step = lambda: None

    def key_value_set(self, key, value, allow_overwrite=False):
        self.held[key] = value

    def key_value_dir_get(self, folder):
        self.step()
        return sorted(self.held.items())


@pytest.fixture
def ended(monkeypatch, caplog):
    """Statuses with which the watch of process 1 of 3 ended the process."""
    statuses: list[int] = []
    monkeypatch.setattr(hosts, "GRACE", 0.05)
    monkeypatch.setattr(hosts, "end_alone", statuses.append)
    monkeypatch.setattr(hosts, "count", lambda: 3)
    monkeypatch.setattr(hosts, "index", lambda: 1)
    monkeypatch.setattr(hosts, "_names", {0: "a", 1: "b", 2: "c"})
    return statuses


def watched(monkeypatch, service: Service, seconds: float) -> None:
    """A watch with a limit of one second, for that many."""
    state = SimpleNamespace(client=service)
    monkeypatch.setattr(hosts, "_state", lambda: state)
    watch = hosts._Watch(service, 1.0)
    threads = [threading.Thread(target=work, daemon=True) for work in (watch.speak, watch.judge)]
    for thread in threads:
        thread.start()
    threads[1].join(seconds)
    state.client = None  # they part
    threads[1].join(10)
    assert not threads[1].is_alive()


def test_a_process_without_signs_of_life_is_named(monkeypatch, ended, caplog):
    service = Service({"0": "0", "2": "0"})
    service.step = lambda: service.held.update({f"{hosts.ALIVE}0": f"{time.monotonic()}"})
    watched(monkeypatch, service, 30)
    assert ended == [hosts.LOST_STATUS]
    assert caplog.messages == [service.held[hosts.LOST]]
    assert caplog.messages[0].startswith(
        "process 2 on c did not answer within 1 s: the checkpoints"
    )


def test_a_coordinator_that_is_stopped_is_named(monkeypatch, ended, caplog):
    """Every call waits from then on; the last signs of the others are older than one's own."""
    service, calls = Service({"0": "0", "2": "0"}), iter(range(3))
    service.step = lambda: time.sleep(30 if next(calls, None) is None else 0)
    monkeypatch.setattr(hosts, "_tell", lambda *_: time.sleep(30))
    watched(monkeypatch, service, 20)
    assert ended == [hosts.LOST_STATUS]
    assert caplog.messages[0].startswith("process 0 on a did not answer within 1 s")


def test_what_another_process_found_ends_this_one(monkeypatch, ended, caplog):
    watched(monkeypatch, Service({"lost": "process 2 did not answer"}), 30)
    assert (ended, caplog.messages) == ([hosts.LOST_STATUS], ["process 2 did not answer"])


def test_signs_of_life_and_an_orderly_end_raise_no_alarm(monkeypatch, ended, caplog):
    service = Service({})
    signs = {hosts.ALIVE + process: "" for process in "02"}
    service.step = lambda: service.held.update(dict.fromkeys(signs, f"{time.monotonic()}"))
    watched(monkeypatch, service, 3)
    assert (ended, caplog.messages) == ([], [])


STUCK = """
    import os, signal, sys
    from k3jax.display import show_logs
    show_logs()
    from k3jax import hosts
    stopped, *where = sys.argv[1:]
    hosts.connect()
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    try:
        split = NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x"))
        x = jax.make_array_from_callback((12,), split, lambda index: jax.numpy.ones(12)[index])
        total = jax.jit(lambda x: x.sum())
        assert float(total(x)) == 12
        hosts.agree()
        if hosts.index() == int(stopped):
            os.kill(os.getpid(), signal.SIGSTOP)
        hosts.agree() if where[hosts.index()] == "agree" else float(total(x))
    except hosts.LostHost as error:
        print(f"k3jax: {error}", flush=True)
        hosts.end_alone(hosts.LOST_STATUS)
"""


@pytest.mark.parametrize(
    ("stopped", "where"),
    [
        pytest.param(1, ("agree", ""), marks=pytest.mark.long),
        pytest.param(1, ("device", ""), marks=pytest.mark.slow),
        pytest.param(0, ("", "agree"), marks=pytest.mark.long),
        pytest.param(0, ("", "device"), marks=pytest.mark.slow),
        pytest.param(2, ("agree", "device", ""), marks=pytest.mark.slow),
        pytest.param(2, ("device", "agree", ""), marks=pytest.mark.long),
    ],
)
def test_a_process_that_is_stopped_is_named_wherever_the_others_are(stopped, where):
    """10 s without a sign, 2 more for the rounds, 2 of grace, and 3 in which process 0 lingers."""
    group = Group([script(STUCK, stopped, *where)] * len(where), K3JAX_HOST_TIMEOUT="10")
    state = Path(f"/proc/{group.processes[stopped].pid}/stat")
    try:
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            assert all(process.poll() is None for process in group.processes), group.wait()
            time.sleep(0.05)
        began = time.monotonic()
        while sum(process.poll() is None for process in group.processes) > 1:
            assert time.monotonic() - began < 120
            time.sleep(0.05)
    finally:
        group.processes[stopped].kill()
        found = group.wait()
    for rank, (code, output) in enumerate(found):
        if rank != stopped:
            assert code == hosts.LOST_STATUS, output[-4000:]
            words = rf"^(k3jax|error): process {stopped} on \S+ did not answer within \d+ s"
            assert re.search(words, output, re.M), output[-4000:]
            assert "Terminating process" not in output  # JAX's own end, which names no host


LEAVE = """
    import sys, time
    from k3jax import hosts
    watch = hosts._Watch
    hosts._Watch = lambda client, limit: watch(client, 5.0)
    hosts.connect()
    if hosts.index() == int(sys.argv[1]):
        time.sleep(15)
    hosts.disconnect()
    print("left", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", [0, 1])
def test_a_process_that_waits_in_disconnect_is_not_lost(last):
    for output in succeeded(Group([script(LEAVE, last)] * 2).wait()):
        assert output == "left\n"


MEMORY = """
    import resource, sys
    from pathlib import Path
    from k3jax import hosts
    hosts.connect()
    import grain, jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec
    from k3jax.checkpoint import CheckpointWriter, restore
    from k3jax.sharding.mesh import MeshConfig, make_mesh

    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    shape = (8, 2**24)  # 512 MB
    folder = Path(sys.argv[2])
    if sys.argv[1] == "save":
        def part(index):
            return np.full((1, shape[1]), index[0].start, np.float32)
        x = jax.make_array_from_callback(shape, split, part)
        with CheckpointWriter(folder, keep_last=1) as writer:
            writer.save(1, {"x": x}, iter(grain.MapDataset.range(9).to_iter_dataset()), {})
    else:
        target = jax.ShapeDtypeStruct(shape, np.float32, sharding=split)
        jax.block_until_ready(jax.device_put(1))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = restore(folder, {"x": target})
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for shard in found.state["x"].addressable_shards:
            assert shard.data[0, 7] == shard.index[0].start
        print("megabytes", (after - before) * 1024 / 1e6)
    hosts.disconnect()
"""


@pytest.mark.slow
def test_kf_083_a_process_reads_what_its_devices_hold(tmp_path):
    """512 MB on 8 devices of 2 processes: 268 MB each. A second copy of that would be 537."""
    succeeded(Group([script(MEMORY, "save", tmp_path)] * 2, devices=4).wait())
    outputs = succeeded(Group([script(MEMORY, "restore", tmp_path)] * 2, devices=4).wait())
    for output in outputs:
        assert float(re.search(r"megabytes (\S+)", output)[1]) < 450, output


# ---- the command

STEPS = 8
FLAGS = f"""
    --model.moe None --model.num-dense-layers 3 --batch-size 8 --seq-len 64
    --steps {STEPS} --checkpoint-every 3 --eval-every 4
"""
MICRO = [*TINY, *FLAGS.split()]


class Runs:
    """Starts the command with some processes; all runs share data and compiled programs."""

    def __init__(self, base: Path):
        self.base, self.data = base, text_folder(base / "text")

    def start(
        self, run: str, processes: int, *flags, devices: int = 1, before="", **env: str
    ) -> Group:
        """`before`: code for the highest process, run ahead of the command."""
        given = [*MICRO, *map(str, flags), "--data", str(self.data)]
        args = ["train", "nano", *given, "--run-dir", str(self.base / run)]
        plain = ["-m", "k3jax.cli", *args]
        last = script(before + "\nimport sys\nfrom k3jax.cli import main\nsys.exit(main())", *args)
        cache = str(self.base / f"cache_{processes}x{devices}")
        programs = [plain] * (processes - 1) + [last if before else plain]
        return Group(programs, devices=devices, **{"K3JAX_CACHE_DIR": cache, **env})

    def losses(self, run: str) -> list[float]:
        return [record["loss"] for record in records(self.base / run)]

    def steps(self, run: str) -> list[int]:
        return checkpoint.steps(self.base / run / "checkpoints")[0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def reference(runs):
    """Losses of one process with one device."""
    succeeded(runs.start("reference", 1).wait())
    losses = runs.losses("reference")
    assert len(losses) == STEPS
    return losses


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5)


def halt(step: int) -> str:
    """Code that sends SIGTERM to its process when `step` steps are launched."""
    return textwrap.dedent(f"""
        import os, signal
        import k3jax.train as loop
        place = loop._place
        def counted(setup, batch):
            counted.step += 1
            if counted.step == {step} < setup.cfg.steps:
                os.kill(os.getpid(), signal.SIGTERM)
            return place(setup, batch)
        restored = loop._restored
        def after(setup, run):
            counted.step = run.latest_step()
            return restored(setup, run)
        counted.step = 0
        loop._place, loop._restored = counted, after
    """)


@pytest.mark.slow
def test_kf_047_two_processes_train_as_one(runs, reference):
    outputs = succeeded(runs.start("two", 2, "--mesh.fsdp", 2).wait())
    close(runs.losses("two"), reference)
    one, two = (
        [record["val_loss"] for record in records(runs.base / run) if "val_loss" in record]
        for run in ("reference", "two")
    )
    close(one, two)
    assert f"finished step {STEPS}" in outputs[0]
    assert "step" not in outputs[1].replace("steps", ""), "only process 0 writes"


@pytest.mark.slow
def test_kf_109_kf_112_every_start_with_other_processes_and_another_mesh(runs, reference):
    """2 x 4 devices, then 1 x 1, then 4 x 2: one run, its losses those of the reference.

    Each part but the last ends with a signal to the process of the highest number.
    """
    starts = [
        (3, 2, 4, "--mesh.fsdp 2 --mesh.context 2 --mesh.tensor 2 --mesh.data 1"),
        (5, 1, 1, ""),
        (STEPS, 4, 2, "--mesh.context 4 --mesh.fsdp 2"),
    ]
    for until, processes, devices, mesh in starts:
        group = runs.start("elastic", processes, *mesh.split(), devices=devices, before=halt(until))
        outputs = succeeded(group.wait())
        assert len(runs.losses("elastic")) == until, outputs[0]
    close(runs.losses("elastic"), reference)


FAILING = """
    from k3jax.data.packing import StreamsIterator
    make = StreamsIterator.__next__
    def failing(self):
        failing.calls += 1
        if failing.calls == 5:
            raise {error}
        return make(self)
    failing.calls = 0
    StreamsIterator.__next__ = failing
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("OSError(5, 'the disk is gone')", r"stopped the run: OSError: .*the disk is gone"),
        ("StopIteration", "has no more data, others have"),
    ],
)
def test_kf_115_one_process_without_a_batch_stops_all_and_nothing_is_lost(runs, error, words):
    run = f"failing_{error[:4]}"
    before = textwrap.dedent(FAILING.format(error=error))
    found = runs.start(run, 2, "--mesh.fsdp", 2, before=before).wait()
    assert [code for code, _ in found] == [2, 2], found
    for _, output in found:
        assert re.search(f"k3jax: process 1 on \\S+ {words}", output), output[-3000:]
    assert "Traceback" not in found[0][1]
    assert runs.steps(run)[-1] == len(runs.losses(run)) == 4
    outputs = succeeded(runs.start(run, 2, "--mesh.fsdp", 2).wait())
    assert "continues after step 4" in outputs[0]
    assert len(runs.losses(run)) == STEPS


def wait_for_steps(runs: Runs, run: str, count: int, group: Group) -> None:
    file, deadline = runs.base / run / "metrics.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if file.exists() and file.read_bytes().count(b"\n") >= count:
            return
        assert all(process.poll() is None for process in group.processes), group.wait()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_gone_ends_the_others_with_its_name(runs, number):
    """Killed, and stuck: the other ends within the time-out, and says which one it was."""
    run = f"gone_{number.name}"
    flags = ["--mesh.fsdp", 2, "--steps", 100_000]
    group = runs.start(run, 2, *flags, K3JAX_HOST_TIMEOUT="40")
    try:
        wait_for_steps(runs, run, 4, group)
        began = time.monotonic()
        group.processes[1].send_signal(number)
        _, errors = group.processes[0].communicate(timeout=PATIENCE)
    finally:
        for process in group.processes:
            process.kill()
        group.processes[1].communicate()
    assert time.monotonic() - began < 90
    assert group.processes[0].returncode == hosts.LOST_STATUS, errors[-4000:]
    assert re.search(r"process 1 on \S+ (is gone|did not answer)", errors), errors[-4000:]
    assert 3 in runs.steps(run)


@pytest.mark.slow
def test_a_process_that_never_comes_is_named_by_those_that_came(runs):
    group = runs.start("missing", 3, K3JAX_HOST_TIMEOUT="30")
    group.processes[2].kill()
    found = group.wait()
    for code, output in found[:2]:
        assert code == 2
        assert re.search("k3jax: process 2 of 3 did not come to coordinator localhost", output)
    assert not (runs.base / "missing").exists()


@pytest.mark.slow
def test_processes_that_were_started_differently_are_refused(runs):
    group = runs.start("different", 2, before="import sys; sys.argv += ['--seed', '1']")
    for code, output in group.wait():
        assert code == 2
        assert "has configuration and data" in output
    assert not (runs.base / "different").exists()
