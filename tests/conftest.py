"""Set-up of every test run: 8 simulated CPU devices, full matmul precision, and no success without tests."""

import os

# Tests run each program a few times at most, so compiling quickly beats running quickly.
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
    )
)

import jax
import pytest

jax.config.update("jax_default_matmul_precision", "highest")

# Of a whole run with these markers: fewer means that something was not collected.
FEWEST_TESTS = {"not slow and not aot_tpu": 300, "aot_tpu": 11}


def pytest_collection_modifyitems(items):
    """Hardware tests are skipped, by name, where the hardware is missing."""
    platform = jax.default_backend()
    for item in items:
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
