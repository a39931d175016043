"""A temporary folder that goes with its program, whatever ends that, and with it the shared memory that killed ranks left."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
import weakref
from pathlib import Path

from harness.errors import HarnessError
from harness.run.folder import RunDir

# For a shell, which starts at once and needs next to nothing while it waits.
_SWEEP = """
is_alive() { read -r stat 2>/dev/null <"/proc/$1/stat" && case ${stat##*)} in " Z"*|" X"*) false ;; esac; }
read -r _ && keep=$2
patience=40
for signature in "$1"/processes/*; do
    pid=${signature##*/}
    while [ "$pid" != "$keep" ] && is_alive "$pid" && [ $patience -gt 0 ]; do sleep 0.05; patience=$((patience - 1)); done
    is_alive "$pid" || rm -f "/dev/shm/torch_${pid}_"*
done
rm -rf -- "$1" "/dev/shm/sem.${1##*/}-"*
"""
"""Torch names a tensor's shared memory after the process, and unlinks it once the other side has it: a process that is
killed in between leaves it. The parent ($2) that says a line goes on, and may still use its own; its end of file is its end."""


_PREFIX = "harness-"
_MOST_BYTES = 107
"""Of the path of a socket, by the kernel's ``sockaddr_un``."""


def _root() -> str:
    """Return the folder for temporary files; a short one where no socket of ``multiprocessing`` would fit into the user's.

    Raises:
        HarnessError: The user's is too long, and no other can be written to.
    """
    chosen = tempfile.gettempdir()
    # mkdtemp() adds 8 characters, and so does multiprocessing to the name of its socket.
    if len(os.fsencode(f"{chosen}/{_PREFIX}12345678/listener-12345678")) <= _MOST_BYTES:
        return chosen
    too_long = f"TMPDIR={chosen} is too long: paths of sockets have at most {_MOST_BYTES} bytes"
    # /dev/shm last: what lies there takes memory.
    short = next((folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.access(folder, os.W_OK | os.X_OK)), None)
    if short is None:
        raise HarnessError(f"{too_long}. Set TMPDIR to a shorter one.")
    warnings.warn(f"{too_long}. What ranks need while they run is kept in {short}.", RuntimeWarning, stacklevel=2)
    return short


class TempDir:
    """A private folder, removed when it is closed; if this program is killed, by the shell that waits beside it.

    Attributes:
        path: The folder, readable for this user alone.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_root()))
        # Each process that uses the folder leaves a file here that is named by its number.
        (self.path / "processes").mkdir()
        try:
            # In a session of its own, where no Ctrl-C reaches it; in /, so that it keeps no folder of the user's busy; and
            # with the system's own PATH behind the user's, which may lack rm and sleep.
            self._sweeper = subprocess.Popen(
                ["/bin/sh", "-c", _SWEEP, "sh", str(self.path), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={**os.environ, "PATH": os.pathsep.join([os.environ.get("PATH", ""), os.defpath])},
                start_new_session=True,
            )
        except OSError:
            shutil.rmtree(self.path)
            raise
        assert self._sweeper.stdin is not None
        self._pipe = self._sweeper.stdin
        _living.add(self)

    def run(self) -> RunDir:
        """Return the folder as that of a run."""
        run = RunDir(self.path)
        run.temp_dir.write_text(str(self.path))
        return run

    def close(self) -> None:
        """Remove the folder, after the processes that have signed in it; again has no effect."""
        if not self._pipe.closed:
            # A line, because what a copy of this process has started may hold the pipe open.
            self._sweeper.communicate(b"\n")

    def part(self) -> None:
        """Leave the folder to the process that this one was forked from: its end is not to wait for this one's."""
        self._pipe.close()


_living: weakref.WeakSet[TempDir] = weakref.WeakSet()


def _part_from_all() -> None:
    for temp_dir in _living:
        temp_dir.part()
    _living.clear()


os.register_at_fork(after_in_child=_part_from_all)
