"""A Python without what Windows lacks: imported before vitascope, in a process of its own.

Its paths, and its rules for open files, cannot be pretended here.
"""

import multiprocessing
import os
import signal
import sys

import filelock  # noqa: F401 - has its own locks for Windows; here it needs fcntl

for module in ("fcntl", "resource"):
    sys.modules[module] = None  # type: ignore[assignment] - an import of it fails
_LACKING = {
    os: "fork forkpty pread pwrite nice sync killpg setpgid getpgid geteuid sched_getaffinity",
    signal: "SIGHUP SIGALRM pthread_sigmask setitimer",
}
for lacking, names in _LACKING.items():
    for name in names.split():
        delattr(lacking, name)
multiprocessing.set_start_method("spawn")

from vitascope import storage  # noqa: E402

storage.WINDOWS = True
