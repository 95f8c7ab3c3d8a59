"""An executable that is Python with torch, transformers and the executor imported already: tests that start programs
give it in place of `sys.executable`. `python zygote.py SOCKET` imports them once and forks for each program. The
executable, a few lines without imports of its own, has the program's standard streams, folder and environment sent,
passes signals on and ends as the program does. The program's own `sys.executable` is the executable.

A program ends after its threads and atexit functions, before modules are taken apart: that would write to every page
that it shares (0.4 CPU seconds). With ZYGOTE_END=whole in its environment it ends as the interpreter does.

It does not know: other options than -c, -m, -u, -W and -X faulthandler; variables that are read when torch or
transformers is imported, but for OMP_NUM_THREADS, or by Python itself; descriptors beside the standard streams.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

SHIM = """#!{python} -IS
import json, os, signal, socket, sys
zygote = socket.socket(socket.AF_UNIX)
zygote.connect({address!r})
said = json.dumps([os.path.abspath(sys.argv[0]), sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(zygote, [len(said).to_bytes(8, "big")], [0, 1, 2])
zygote.sendall(said)
process = int(zygote.recv(20))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, _: os.kill(process, number))
status = os.waitstatus_to_exitcode(int(zygote.recv(20) or signal.SIGKILL))
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""
LIMIT_S = 300.0


class Program(NamedTuple):
    """What a process is to run: executable, arguments, environment, folder."""

    executable: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Gives the executable's path; the processes of all programs end with the block."""
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket is short
        yield from _running(Path(folder))


def _running(folder: Path) -> Iterator[str]:
    address, executable = str(folder / "socket"), folder / "python"
    executable.write_text(SHIM.format(python=sys.executable, address=address), encoding="utf-8")
    executable.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", "PYTHONIOENCODING": "utf-8"}
    server = subprocess.Popen([sys.executable, __file__, address], stdin=subprocess.PIPE, env=environment)
    until_s = time.monotonic() + LIMIT_S
    while not Path(address).exists():
        assert server.poll() is None and time.monotonic() < until_s, "no process to fork from"
        time.sleep(0.02)
    try:
        yield str(executable)
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(60)


def asked(connection: socket.socket) -> tuple[Program, list[int]]:
    """Reads a program, and its standard streams."""
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    text = b""
    while len(text) < int.from_bytes(head, "big"):
        text += connection.recv(1 << 16)
    return Program(*json.loads(text)), streams


def serve(listener: socket.socket) -> Program | None:
    """Returns in each forked process, with its program; None at the end of standard input."""
    children: dict[int, socket.socket] = {}
    ended, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it is the byte that counts
    while True:
        sources: list[Any] = [0, listener, ended, *children.values()]
        ready, _, _ = select.select(sources, [], [], 1.0 if children else None)
        if ended in ready:
            ended.recv(1 << 10)
        if 0 in ready:
            for child in children:
                os.kill(child, signal.SIGKILL)
            return None
        if listener in ready:
            connection, _ = listener.accept()
            program, streams = asked(connection)
            child = os.fork()
            if child == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (listener, connection, ended, signalled, *children.values()):
                    one.close()
            for stream in streams:
                os.close(stream)
            if child == 0:
                return program
            connection.sendall(str(child).encode())
            children[child] = connection
        for child, connection in list(children.items()):
            if connection in ready:  # the executable was killed
                os.kill(child, signal.SIGKILL)
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                _, status = os.waitpid(child, 0)
                with contextlib.suppress(OSError):
                    connection.sendall(str(status).encode())
                children.pop(child).close()


STATUS = [0]
"""Of the program, once its main module has ended: the negative of a signal, too."""


def leave() -> None:
    """Runs last of all atexit functions."""
    if os.environ.get("ZYGOTE_END") == "whole":
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a program may close or replace it
            stream.flush()
    if STATUS[0] < 0:
        signal.signal(-STATUS[0], signal.SIG_DFL)
        os.kill(os.getpid(), -STATUS[0])
    os._exit(STATUS[0])


@contextlib.contextmanager
def noting_status() -> Iterator[None]:
    try:
        yield
    except SystemExit as end:
        STATUS[0] = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        STATUS[0] = -signal.SIGINT
        raise
    except BaseException:
        STATUS[0] = 1
        raise


def run(program: Program, paths: list[str]) -> None:
    """As the interpreter begins.

    paths: of modules, without the program's own.
    """
    import torch

    os.environ.clear()
    os.environ.update(program.environment)
    if os.environ.get("ZYGOTE_END") != "whole":
        for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # torch takes its operators apart
            each.atexit = False
    os.chdir(program.folder)
    sys.executable = program.executable
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    own = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*(own.split(os.pathsep) if own else []), *paths]
    arguments = program.arguments
    while True:
        option, arguments = arguments[0], arguments[1:]
        if option == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        elif option == "-X":
            assert arguments.pop(0) == "faulthandler"
            faulthandler.enable()
        elif option == "-u":
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)  # type: ignore[union-attr]
        else:
            break
    if option == "-c":
        sys.argv, sys.path[:0] = ["-c", *arguments[1:]], [""]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    elif option == "-m":
        sys.argv, sys.path[:0] = arguments, [str(Path.cwd())]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = [option, *arguments], [str(Path(option).resolve().parent)]
        runpy.run_path(option, run_name="__main__")


def ready(address: str) -> socket.socket:
    """Imports what programs need, and listens."""
    atexit.register(leave)
    gc.disable()  # modules live as long as the process
    for name in (
        "torch._dynamo",
        "torch.distributed.launcher.api",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.trainer",
        "matplotlib.figure",
        "pandas",
        "executor.run",
        "pstar_sim.cli.typer_app",
    ):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:  # a machine with a GPU may be without
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever runs the tests
    gc.collect()
    gc.freeze()  # what was imported: no process goes through it when it ends
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # as in the process of the tests
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(16)
    Path(address + ".new").rename(address)
    return listener


if __name__ == "__main__":
    own = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    PROGRAM = serve(ready(sys.argv[1]))
    if PROGRAM is not None:
        with noting_status():
            run(PROGRAM, [path for path in sys.path if path not in own])
