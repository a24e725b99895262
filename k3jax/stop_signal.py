"""How a run is asked to stop: a flag that signals set and loops poll."""

import os
import signal
import threading
from typing import Any


class StopSignal:
    """SIGTERM or SIGINT asks for a stop; the loops poll it between steps. SIGINT twice aborts.

    Python runs the handler when the main thread is back from compiled code, so a stop takes effect
    after the step or compilation in progress.
    """

    def __init__(self):
        self.name: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: Any) -> None:
        if self.name is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.name = signal.Signals(number).name
        os.write(2, f"\n{self.name}: saving after this step; Ctrl-C again aborts\n".encode())

    def __bool__(self) -> bool:
        """Whether this process was asked; `hosts.turn` tells the others."""
        return self.name is not None
