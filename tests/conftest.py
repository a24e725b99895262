"""Set-up of every test run: 8 simulated CPU devices or the GPU that is there, full matmul precision,
and no success without tests."""

import gc
import os

# Tests run each program a few times at most, so compiling quickly beats running quickly.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_gpu_autotune_level=0",
    )
)

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share a GPU

import jax
import pytest

if jax.default_backend() != "gpu":
    # Read when triton is first imported; the kernels' own tests then run on a CPU.
    os.environ["TRITON_INTERPRET"] = "1"

jax.config.update("jax_default_matmul_precision", "highest")

# Of a whole run with these markers: fewer means that something was not collected.
FEWEST_TESTS = {"not slow and not long and not aot_tpu": 300, "aot_tpu": 11}


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
    """Compiled programs go with the module that needed them.

    Each maps memory of its own; kept, those of a whole run exceed what Linux grants a process
    (vm.max_map_count, 65,530 maps), and the next compilation ends in a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


def pytest_collection_modifyitems(items):
    """Tests are skipped, by name, where the hardware that they need is missing."""
    platform, devices = jax.default_backend(), jax.device_count()
    for item in items:
        if item.get_closest_marker("devices") and devices < 8:
            item.add_marker(
                pytest.mark.skip(reason=f"needs 8 devices, this machine has {devices} {platform}")
            )
        for marker in ("gpu", "tpu"):
            if item.get_closest_marker(marker) and platform != marker:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs a {marker}, this machine has {platform}")
                )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """A run that tested nothing, or much less than there is, has not succeeded."""
    if exitstatus != pytest.ExitCode.OK or session.config.option.collectonly:
        return
    if hasattr(session.config, "workerinput"):  # the process that collects the results decides
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    passed = len(reporter.stats.get("passed", []))
    option = session.config.option
    whole = not option.keyword and session.config.args == ["tests"]
    fewest = FEWEST_TESTS.get(option.markexpr, 1) if whole else 1
    if passed < fewest:
        reporter.write_line(
            f"only {passed} tests passed, at least {fewest} must: this run proves nothing", red=True
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
