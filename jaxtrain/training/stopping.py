"""How a run is asked to stop: by SIGTERM or SIGINT to any of its processes."""

from __future__ import annotations

import select
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sharding import processes

POLL_SECONDS = 0.25  # between looks at whether another process was asked
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """An event that is set soon after a signal to this or any other process of the program.

    A thread watches: Python runs no handler while the main thread waits inside a barrier. Signals are handled
    in the main thread only, and not before this.
    """
    stop, ended = threading.Event(), threading.Event()
    reader, writer = socket.socketpair()
    main = threading.current_thread() is threading.main_thread()
    if main:
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda *_: stop.set())

    def watch() -> None:
        passed_on = False
        while not ended.is_set():
            if select.select([reader], [], [], POLL_SECONDS)[0] and set(reader.recv(64)) & set(SIGNALS):
                stop.set()
            if stop.is_set() and not passed_on:
                processes.raise_flag("stop")
                passed_on = True
            elif not stop.is_set() and processes.flag_raised("stop"):
                stop.set()

    watcher = threading.Thread(target=watch, name="stop", daemon=True)
    watcher.start()
    try:
        yield stop
    finally:
        ended.set()
        if main:
            signal.set_wakeup_fd(-1)
        watcher.join(10 * POLL_SECONDS)
        reader.close()
        writer.close()
