"""Restarts by `torchrun --max-restarts`: which run the processes before have begun.

torchrun starts the same command again, with new processes. Its agents survive, and with them their store, in
which the first process notes the folder of its run. So a restarted command resumes its own run, and an
existing run of another launch is rejected as always.
"""

from __future__ import annotations

import itertools
import os

from vitascope.run.run import Run
from vitascope.training.distributed import agents_store

_NUMBERS = itertools.count()


class Launch:
    """The place in the store of torchrun's agents for one run: the n-th that each process begins."""

    def __init__(self) -> None:
        launch = os.environ.get("TORCHELASTIC_RUN_ID", "")
        self._key = f"vitascope/{launch}/run-{next(_NUMBERS)}"

    @property
    def begun(self) -> str | None:
        """The run folder or URL that the processes before a restart noted; None without any."""
        store = agents_store()
        if store is None or not store.check([self._key]):
            return None
        return os.fsdecode(bytes.fromhex(store.get(self._key).decode()))

    def note(self, run: Run) -> None:
        """Note the run that this launch has begun or resumed."""
        store = agents_store()
        if store is not None:
            ref = run.path.absolute() if run.store is None else run.ref
            store.set(self._key, os.fsencode(ref).hex())  # the store takes UTF-8 only


def restarts_left() -> bool:
    """Whether torchrun starts the processes again after a failure of this one."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count is not None and most is not None and int(count) < int(most)
