"""Python processes that have imported torch: a server forks one for each rank of a job, in 0.03 s instead of 1.5 s.

    environ[warm.ADDRESS] = warm.server()
    mpiexec -n 2 python tests/support/warm.py SCRIPT ARGUMENTS...

mpiexec starts a client. It hands its arguments, environment, directory, cores and open files to the server, passes signals on,
and ends in the way in which the forked process ends. The forked process runs the program as Python does: SCRIPT, -c CODE, or
-m MODULE. mpi4py and mpicoll are not imported before: torch's plug-ins are loaded in the forked process, in its environment.

Ranks of ``mpicoll.run`` become clients too, if warm_ranks/ is in PYTHONPATH (warm_ranks/sitecustomize.py).

What differs from a fresh process: str hashes are alike on all ranks, the process is no descendant of mpiexec, torch and its
plug-ins are there before the program asks for them, and what torch reads at its import (TORCH_*) is the server's.
`tests.support.launch(fresh=True)` and `run(fresh=True)` are for tests of these.
A process whose environment differs from that of the server in what torch or Python read stays fresh by itself (`fits`).
"""

import atexit
import fcntl
import gc
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping

ADDRESS = "TESTS_WARM_SERVER"  # environment variable: the path of the server's socket
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
AT_IMPORT = ("TORCH", "PYTHON")  # prefixes of variables that are read when Python starts or torch is imported
LATER = (  # of those: what `run` and `become` see to, and what torch._dynamo itself sets when it is imported
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCHINDUCTOR_CACHE_DIR", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"
)  # fmt: skip
HEAD = struct.Struct("I")  # bytes of the request
STATUS = struct.Struct("i")  # as waitpid gives it


def server(environ: Mapping[str, str]) -> str:
    """Starts a server with this environment, for as long as this process lives. Returns the path of its socket."""
    folder = tempfile.mkdtemp(prefix="warm-")
    atexit.register(shutil.rmtree, folder)
    path = os.path.join(folder, "socket")
    with open(f"{path}.environ", "w") as file:
        json.dump(read_at_import(environ), file)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        command = [sys.executable, os.path.abspath(__file__), "--serve", str(listener.fileno())]
        process = subprocess.Popen(
            command, env={**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, stdin=subprocess.PIPE, pass_fds=[listener.fileno()]
        )
    atexit.register(process.communicate)  # its stdin ends, and so does the server
    return path


def read_at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a forked process cannot change any more."""
    return {name: value for name, value in environ.items() if name.startswith(AT_IMPORT) and name not in LATER}


def fits() -> bool:
    """Whether a process of the server is like one that starts in this environment."""
    with open(f"{os.environ[ADDRESS]}.environ") as file:
        return bool(json.load(file) == read_at_import(os.environ))


def client(arguments: list[str]) -> None:
    """In the process that mpiexec started."""
    keeper = socket.socket(socket.AF_UNIX)
    keeper.connect(os.environ[ADDRESS])
    listed = [int(fd) for fd in os.listdir("/proc/self/fd")]
    files = [fd for fd in listed if fd != keeper.fileno() and os.path.exists(f"/proc/self/fd/{fd}")]
    leads = os.getpgid(0) == os.getpid()  # mpiexec sends signals to the process group of a rank
    request = json.dumps([arguments, dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)), leads, files]).encode()
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: keeper.send(bytes([number])))
    socket.send_fds(keeper, [HEAD.pack(len(request))], files)
    keeper.sendall(request)
    status = STATUS.unpack(keeper.recv(STATUS.size))[0]
    if os.WIFSIGNALED(status):
        killer = os.WTERMSIG(status)
        if killer != signal.SIGKILL:
            signal.signal(killer, signal.SIG_DFL)
        os.kill(os.getpid(), killer)
    os._exit(os.WEXITSTATUS(status))


def serve(listener: socket.socket) -> list[str]:
    """Forks a keeper for each client, and the keeper forks the program's process. Returns in that one: its arguments."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return keep(connection)
        connection.close()
    sys.exit()


def keep(client: socket.socket) -> list[str]:
    """Forks the program's process and returns in it: its arguments. The keeper waits for its end and for the client's."""
    head, received, _, _ = socket.recv_fds(client, HEAD.size, 250)
    request = b""
    while len(request) < HEAD.unpack(head)[0]:
        request += client.recv(1 << 20)
    arguments, environ, folder, cores, leads, files = json.loads(request)
    process = os.fork()
    if leads:
        os.setpgid(process, process)  # in both processes: each of them may be the first
    if process == 0:
        client.close()
        become(environ, folder, cores, dict(zip(files, received, strict=True)))
        return list(arguments)
    send = os.killpg if leads else os.kill
    os.closerange(0, client.fileno())
    os.closerange(client.fileno() + 1, 1024)  # a pipe to mpiexec ends when the program ends, not when its keeper does
    end = os.pidfd_open(process)
    while end not in select.select([client, end], [], [])[0]:
        said = client.recv(1)
        send(process, said[0] if said else signal.SIGKILL)
        if not said:
            break  # the client was killed
    _, status = os.waitpid(process, 0)
    try:
        client.send(STATUS.pack(status))
    except OSError:
        os._exit(1)  # there is no client any more
    os._exit(0)


def become(environ: dict[str, str], folder: str, cores: list[int], files: dict[int, int]) -> None:
    """Takes over the client's environment, directory, cores and open files (number there: number here)."""
    os.environ.clear()
    os.environ.update(environ)
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]  # Hydra mixes parts of lines
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background has SIGINT ignored
    apart = {}
    for number, here in files.items():  # away from the numbers that they shall have
        os.set_inheritable(here, True)
        apart[number] = fcntl.fcntl(here, fcntl.F_DUPFD, 1000)
        os.close(here)
    for number, here in apart.items():
        os.dup2(here, number)
        os.close(here)


def run(arguments: list[str]) -> None:
    """What ``python arguments...`` does."""
    import numpy
    import torch

    numpy.random.seed()  # noqa: NPY002
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    torch.set_num_threads(threads)
    # torch makes its pool of threads anew when a forked process first uses it. Two threads that do so at once end the process
    # (pthreadpool-cpp.cc: "Invalid thread pool!"). A rank that has a monitor is its child.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(threads))
    first = arguments[0]
    sys.argv[:] = arguments[1:] if first == "-m" else arguments
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(first, os.path.dirname(os.path.abspath(first)))
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    if torch._is_device_backend_autoload_enabled():
        torch._import_device_backends()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        runpy._run_module_as_main(arguments[1])
        return
    if first == "-c":
        code = compile(arguments[1], "<string>", "exec")
        sys.argv[:] = ["-c", *arguments[2:]]
    else:
        main.__file__ = os.path.abspath(first)
        with open(first, "rb") as file:
            code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        import numpy  # noqa: F401
        import torch._dynamo.utils  # optimizers and DDP import it: another second

        # It imports tabulate, where that is installed, and Python then forgets that Ctrl-C ends the process.
        atexit.unregister(torch._dynamo.utils.dump_compile_times)
        if importlib.util.find_spec("sklearn"):
            import sklearn.datasets  # noqa: F401  the same second in examples

        gc.freeze()
        run(serve(socket.socket(fileno=int(sys.argv[2]))))
    else:
        client(sys.argv[1:])
