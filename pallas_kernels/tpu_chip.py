"""What every TPU kernel must know of the chip: its memory, and how many cores share a grid."""

from jax.experimental.pallas import tpu as pltpu

from k3jax.pallas_kernels.dispatch import platform

VMEM_BYTES = 60 * 2**20  # that a kernel may use, of 64 MiB on a TPU7x
SPARE = 8 * 2**20  # of them, for spills and small operands


def cores() -> int:
    """TensorCores behind one device: a v5p has two, which share a parallel grid dimension."""
    if platform() != "tpu":
        return 1  # interpreted
    return pltpu.get_tpu_info().num_cores
