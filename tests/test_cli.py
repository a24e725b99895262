"""The command: flags, messages, versions, platforms, and what is loaded when."""

import dataclasses
import logging
import os
import re
import subprocess
import sys

import pytest

from k3jax import cli, devices
from k3jax.configs import PRESETS, preset
from k3jax.errors import UserError
from k3jax.flags import overridden
from k3jax.run_dir import from_json, to_json
from k3jax.variants.softplus_gate import SoftplusGateConfig


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs the command in this process; returns code, output and error lines."""
    logger = logging.getLogger("k3jax")
    before = (logger.handlers[:], logger.level, logger.propagate)
    monkeypatch.setenv("K3JAX_CACHE_DIR", "")

    def run(*args):
        code = cli.main(list(args))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    yield run
    logger.handlers[:], logger.level, logger.propagate = before


def python(*args, **env):
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"XLA_FLAGS": ""} | env,
    )


# ---- flags


def test_every_everyday_flag_is_short():
    flags = "--steps 7 --run-dir d --data x --seed 3 --batch-size 4 --seq-len 32"
    cfg = overridden(preset("nano")(), f"{flags} --checkpoint-every 5 --strict".split(), "k3jax")
    found = (cfg.steps, cfg.run_dir, cfg.data, cfg.seed, cfg.batch_size, cfg.seq_len)
    assert found == (7, "d", "x", 3, 4, 32)
    assert (cfg.checkpoint_every, cfg.strict) == (5, True)


def test_nested_flags_and_all_value_types():
    flags = (
        "--model.num-layers 13 --model.kda.g-min -4.5 --model.kda.conv-size None --no-strict "
        "--model.pattern kda mla --model.activation.kind=swiglu --model.activation.gate_cap None "
        "--model.activation.up-cap None --optim.peak-lr 1e-2 --optim.no-nesterov"
    )
    cfg = overridden(preset("nano")(), flags.split(), "k3jax")
    model = cfg.model
    assert (model.num_layers, model.kda.g_min, model.kda.conv_size) == (13, -4.5, None)
    assert model.pattern == ("kda", "mla")
    assert dataclasses.astuple(model.activation) == ("swiglu", None, None)
    assert (cfg.optim.peak_lr, cfg.optim.nesterov, cfg.strict) == (1e-2, False, False)


def test_values_are_checked_together():
    """Either flag alone would be refused."""
    flags = ["--model.moe.num-active", "20", "--model.moe.num-experts", "24"]
    cfg = overridden(preset("nano")(), flags, "k3jax")
    assert (cfg.model.moe.num_active, cfg.model.moe.num_experts) == (20, 24)
    with pytest.raises(UserError, match="num_active"):
        overridden(preset("nano")(), flags[:2], "k3jax")


def test_an_optional_part_can_be_left_out():
    nano = preset("nano")()
    flags = ["--model.moe", "None", "--model.num-dense-layers", str(nano.model.num_layers)]
    assert overridden(nano, flags, "k3jax").model.moe is None


@pytest.mark.parametrize("name", PRESETS)
def test_configurations_survive_json(name):
    cfg = preset(name)()
    assert from_json(type(cfg), to_json(cfg)) == cfg


def test_a_variant_survives_json():
    cfg = preset("nano")()
    fields = {f.name: getattr(cfg.model.kda, f.name) for f in dataclasses.fields(cfg.model.kda)}
    variant = SoftplusGateConfig(
        **fields | {"gate": "softplus", "g_min": None}, rate_min=1.0, rate_max=16.0
    )
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, kda=variant))
    back = from_json(type(cfg), to_json(cfg))
    assert back == cfg
    assert type(back.model.kda) is SoftplusGateConfig


@pytest.mark.parametrize(
    "named",
    ["this:C", "antigravity:C", "k3jax.nowhere:C", "k3jax.layers.mla:MLAConfig", "os:path", "x"],
)
def test_a_saved_config_runs_no_code(named):
    """A folder from elsewhere may name any class; modules that are not k3jax's are not imported."""
    saved, before = to_json(preset("nano")()), set(sys.modules)
    saved["model"]["kda"]["class"] = named
    with pytest.raises(UserError, match=re.escape(f"kda was a {named}")):
        from_json(type(preset("nano")()), saved)
    assert not {"this", "antigravity"} & (set(sys.modules) - before)


def test_json_of_another_version_names_the_field():
    saved = to_json(preset("nano")())
    saved["model"]["kda"]["colour"] = saved["model"].pop("width")
    with pytest.raises(UserError, match=r"model\.width|model\.kda\.colour"):
        from_json(type(preset("nano")()), saved)


def test_help_lists_the_flags_with_their_meaning(command):
    code, out, _ = command("train", "nano", "--help")
    text = " ".join(out)
    assert code == 0
    assert "--steps INT" in text
    assert "optimizer steps in all" in text
    assert "--model.kda.g-min" in text


@pytest.mark.parametrize(
    "args", [["generate", "--help"], ["eval", "--help"], ["configs", "--help"]]
)
def test_every_command_has_help(command, args):
    code, out, _ = command(*args)
    assert code == 0
    assert "usage" in out[0]


def test_bare_command_prints_usage(command):
    code, out, lines = command()
    assert (code, out, lines[0]) == (2, [], "usage: k3jax COMMAND ...")


@pytest.mark.parametrize("args", [["configs"], ["check"]])
def test_output_that_nobody_takes(args):
    """A reader of a pipe that has gone ends the command in silence, a full disk with one line."""
    command = [sys.executable, "-m", "k3jax.cli", *args]
    reads, writes = os.pipe()
    os.close(reads)
    ran = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (ran.returncode, ran.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert ran.stderr.startswith("k3jax: output not written: No space left on device; free some")


def test_characters_that_a_terminal_cannot_show_are_escaped():
    code = "from k3jax import cli; cli._dispatch = lambda _: print('\\xe9'); cli.main([])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"\\xe9\n", b"")


def test_help_and_wrong_names_load_no_jax():
    for args, code in (
        (["--help"], 0),
        (["train", "nanno"], 2),
        (["trian"], 2),
        (["generate"], 2),
        (["eval"], 2),
    ):
        program = (
            "import sys; from k3jax.cli import main; code = main(sys.argv[1:]); "
            "assert 'jax' not in sys.modules; sys.exit(code)"
        )
        done = python("-c", program, *args)
        assert done.returncode == code, done.stderr
        assert "Assertion" not in done.stderr


# ---- versions and platforms

GOOD = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "flax": "0.12.12"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.9"}, ["jax 0.11.2 with flax 0.12.9"]),
        ({"jax": "0.6.2", "jaxlib": "0.6.2"}, ["jax 0.6.2 with flax 0.12.12", "jax<0.13,>=0.11.2"]),
        ({"jax": "0.13.0", "jaxlib": "0.13.0"}, ["jax 0.13.0 with flax 0.12.12"]),
        ({"jaxlib": "0.11.2"}, ["jax 0.12.0.1 with jaxlib 0.11.2", '"jax==0.12.0.1"']),
    ],
)
def test_kf_127_a_bad_pair_is_named_with_the_repair(change, words):
    with pytest.raises(UserError) as error:
        devices.check_versions(GOOD | change)
    for word in [*words, "pip install -U"]:
        assert word in str(error.value)


def test_kf_127_good_pairs_and_old_python():
    devices.check_versions(GOOD)
    devices.check_versions(GOOD | {"jax": "0.11.2", "jaxlib": "0.11.2"})
    devices.check_versions()
    with pytest.raises(UserError, match=r"Python 3\.11\.9 is too old"):
        devices.check_versions(GOOD, (3, 11, 9))


@pytest.mark.parametrize(
    ("name", "extra"), [("jax-cuda12-plugin", "cuda12"), ("jax-cuda13-pjrt", "cuda13")]
)
def test_kf_123_a_plugin_of_another_version_is_named_with_the_repair(name, extra):
    devices.check_versions(GOOD | {name: "0.12.0.1"})
    with pytest.raises(UserError) as error:
        devices.check_versions(GOOD | {name: "0.11.2"})
    assert f"{name} 0.11.2 with jaxlib 0.12.0.1" in str(error.value)
    assert f'pip install -U "jax[{extra}]==0.12.0.1"' in str(error.value)


def test_kf_123_the_check_starts_no_backend():
    program = (
        "import sys; from k3jax.cli import main; code = main(['check']); "
        "assert not {'jax', 'jaxlib'} & set(sys.modules); sys.exit(code)"
    )
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert "jaxlib 0." in done.stdout
    assert "fit together" in done.stdout


def test_kf_124_an_absent_platform_is_an_error(tmp_path):
    flags = ["--platform", "tpu", "--run-dir", str(tmp_path / "run")]
    done = python("-m", "k3jax.cli", "train", "nano", *flags)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "platform 'tpu' was asked for and is not available" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argument", "environment", "named"), [("'cuda'", "", "cuda"), ("None", "tpu", "tpu")]
)
def test_kf_124_whichever_way_it_is_asked_for(argument, environment, named):
    program = f"from k3jax import devices; devices.start_backend({argument})"
    done = python("-c", program, JAX_PLATFORMS=environment)
    assert done.returncode
    assert f"UserError: platform '{named}' was asked for" in done.stderr


# ---- compilation cache

CACHE = """
import sys
import jax, jax.numpy as jnp
import numpy as np
from k3jax import devices
devices.use_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
size = int(sys.argv[1])
jax.block_until_ready(jax.jit(lambda x: jnp.sin(x) @ x)(np.ones((size, size), np.float32)))
print(sum(name == "/jax/compilation_cache/cache_hits" for name in hits) > 0)
"""


def test_kf_116_a_later_start_hits_and_another_shape_misses(tmp_path):
    found = [
        python("-c", CACHE, size, K3JAX_CACHE_DIR=str(tmp_path)).stdout.strip()
        for size in ("32", "32", "48")
    ]
    assert found == ["False", "True", "False"]


def test_kf_116_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    import jax

    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(tmp_path / "file" / "cache"))
    devices.use_compilation_cache()
    assert "cannot be written (Not a directory)" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before


def test_kf_116_the_cache_is_bounded(monkeypatch, tmp_path):
    import jax

    set_to = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.update({name: value}))
    monkeypatch.setenv("K3JAX_CACHE_DIR", str(tmp_path / "a"))
    devices.use_compilation_cache()
    assert set_to["jax_compilation_cache_dir"] == str(tmp_path / "a")
    assert 0 < set_to["jax_compilation_cache_max_size"] <= 2**33
