"""Many short jobs, each of which must end with the right status and nothing strange on stderr.

    python -m tests.faults.short_jobs --jobs 500 --load 4

A campaign, not a test: it looks for what happens once in hundreds of runs, such as a process that
aborts while it ends, or a report that names the wrong rank. Every job is a real ``horovodrun`` of
two ranks with one way to compute, one way to end, and one transport. Starting Python and torch anew
for each would take most of the time, so ranks are forked from a process that has imported both
already (``--fresh`` does without). The interpreter of a forked rank is taken down as any other's.
"""

from __future__ import annotations

import argparse
import array
import collections
import ctypes
import itertools
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANG = 120.0

WORK = ("allreduce", "asynchronous", "pending", "optimizer", "ddp", "ddp kept")
END = ("return", "raise", "exit 0", "exit 3", "one raises", "one exits 3", "one exits 0", "killed")
TRANSPORTS = ("shm", "gloo")

STRANGE = re.compile(
    r"terminate called|Fatal Python error|Segmentation fault|Aborted|core dumped|Exception ignored"
    r"|double free|corrupted|internal traceback"
)


# -- a rank ----------------------------------------------------------------------------------------


def work(kind: str) -> object:
    """Compute something together; what is returned is kept until the process ends."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1000), name="first")
    if kind == "asynchronous":
        handles = [hvd.allreduce_async(torch.ones(100), name=f"a{i}") for i in range(20)]
        return [hvd.synchronize(handle) for handle in handles]
    if kind == "pending":
        return [hvd.allreduce_async(torch.ones(100_000), name=f"p{i}") for i in range(20)]
    if kind == "optimizer":
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
        return model, optimizer
    if kind.startswith("ddp"):
        import torch.distributed as dist

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
        model(torch.ones(4, 64)).sum().backward()
        hvd.allreduce(torch.ones(10), name="beside")
        if kind == "ddp":
            dist.destroy_process_group()
        # Never freed: DDP waits with Python's lock for a thread of its group, which may want that
        # lock for its last operation (torch 2.13). A process with DDP alone hangs likewise.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(model))
        return model
    return None


def rank_main(kind: str, end: str, shutdown: bool) -> object:
    import torch

    import horovod.torch as hvd

    kept = work(kind)
    if end.startswith("one"):
        if hvd.rank() == 1:
            if end == "one raises":
                raise ValueError("the cause")
            sys.exit(int(end.rpartition(" ")[2]))
        hvd.allreduce(torch.ones(4), name="without rank 1")
    if end == "killed":
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(torch.ones(4), name="without rank 1")
    if shutdown:
        hvd.shutdown()
    if end == "raise":
        raise ValueError("the end")
    if end.startswith("exit"):
        sys.exit(int(end.rpartition(" ")[2]))
    return kept


# -- ranks forked from a warm process --------------------------------------------------------------


def serve(path: str) -> object:
    """Fork a rank for everybody who asks; in a rank this returns, and the program ends."""

    import torch._dynamo  # noqa: F401 (what optimizers and DDP load when they are first used)

    import horovod.torch  # noqa: F401

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    print("ready", flush=True)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)  # ends with us
    children: dict[socket.socket, int] = {}
    while True:
        for key, _ in selector.select(0.01):
            if key.fileobj == 0:
                os._exit(0)
            if key.fileobj is listener:
                client, _ = listener.accept()
                request, descriptors = receive(client)
                child = os.fork()
                if child == 0:
                    selector.close()
                    listener.close()
                    for other in (client, *children):
                        other.close()
                    return become_rank(request, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                children[client] = child
                selector.register(client, selectors.EVENT_READ)
            elif key.fileobj in children:  # its client is gone: the launcher has ended it
                os.kill(children[key.fileobj], signal.SIGTERM)
                selector.unregister(key.fileobj)
        for client, child in list(children.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                try:
                    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                except OSError:
                    pass
                if client in {key.fileobj for key in selector.get_map().values()}:
                    selector.unregister(client)
                client.close()
                del children[client]


def become_rank(request: dict, descriptors: list[int]) -> object:
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    return rank_main(*request["arguments"])


def receive(client: socket.socket) -> tuple[dict, list[int]]:
    data, ancillary, _, _ = client.recvmsg(1 << 20, socket.CMSG_SPACE(3 * 4))
    numbers = array.array("i")
    for _, _, content in ancillary:
        numbers.frombytes(content)
    while not data.endswith(b"\n"):
        data += client.recv(1 << 20)
    return json.loads(data), list(numbers)


def ask(path: str, arguments: list[object]) -> None:
    """What the launcher starts: it lets the warm process fork a rank, and ends as that does."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        text = json.dumps({"env": dict(os.environ), "arguments": arguments}) + "\n"
        socket.send_fds(server, [text.encode()], [0, 1, 2])
        code = int(server.recv(16) or b"1")
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# -- the campaign ----------------------------------------------------------------------------------


def expected(end: str) -> tuple[int, bool]:
    """The status of the job, and whether the report must name rank 1."""
    return {
        "return": (0, False),
        "raise": (1, False),
        "exit 0": (0, False),
        "exit 3": (3, False),
        "one raises": (1, True),
        "one exits 3": (3, True),
        "one exits 0": (1, True),
        "killed": (137, True),
    }[end]


def problem_of(done: subprocess.CompletedProcess[str], kind: str, end: str) -> str:
    """What is wrong with how a job ended; nothing if all is well."""
    status, named = expected(end)
    if kind == "pending" and not named and "in vain" in done.stderr:
        status = 1  # a rank that waits for nothing may be gone before the other has submitted
    strange = STRANGE.search(done.stderr)
    if strange:
        return f"stderr has {strange[0]!r}"
    if done.returncode != status:
        return f"status {done.returncode} instead of {status}"
    if named and not re.search(r"^  1 +localhost ", done.stderr, re.MULTILINE):
        return "the report does not name rank 1"
    if end == "one raises" and "ValueError: the cause" not in done.stderr.partition(" was:\n")[2]:
        return "the report has not the traceback of rank 1"  # torch puts [rank1]: before its lines
    return ""


def run_job(kind: str, end: str, shutdown: bool, transport: str, path: str, fresh: bool):
    arguments = json.dumps([kind, end, shutdown])
    role = ["rank"] if fresh else ["ask", path]
    options = ["-np", "2", sys.executable, *([] if fresh else ["-S", "-E"])]
    command = [sys.executable, "-m", "horovod.runner", *options, __file__, *role, arguments]
    env = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
    env |= {"PYTHONPATH": str(ROOT), "HOROVOD_CPU_OPERATIONS": transport, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=HANG, check=False, cwd=ROOT
    )


def campaign(options: argparse.Namespace) -> int:
    cases = [
        case
        for case in itertools.product(WORK, END, (False, True), TRANSPORTS)
        if options.only is None or re.search(options.only, " ".join(map(str, case)))
    ]
    random.Random(options.seed).shuffle(cases)
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.load)
    ]
    found: list[str] = []
    seen: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/server"
        warm = None
        if not options.fresh:
            warm = subprocess.Popen(
                [sys.executable, __file__, "serve", path],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert warm.stdout is not None
            assert warm.stdout.readline() == "ready\n"
        try:
            for number, case in enumerate(itertools.islice(itertools.cycle(cases), options.jobs)):
                try:
                    done = run_job(*case, path, options.fresh)
                    problem = problem_of(done, *case[:2])
                except subprocess.TimeoutExpired as late:
                    done, problem = late, f"not ended after {HANG:g} s"
                seen[case[1]] += 1
                if options.verbose:
                    print(f"{time.monotonic() - began:7.1f} s  {case} {problem}", flush=True)
                if problem:
                    found.append(f"job {number}, {case}: {problem}")
                    print(f"{found[-1]}\n{done.stderr}", flush=True)
                if number % 10 == 9:
                    took = time.monotonic() - began
                    print(
                        f"{number + 1} jobs in {took:.0f} s, {len(found)} with problems", flush=True
                    )
        finally:
            for process in (*busy, *([warm] if warm else [])):
                process.kill()
                process.wait()
    took = time.monotonic() - began
    print(f"{sum(seen.values())} jobs in {took:.0f} s, {len(found)} with problems: {dict(seen)}")
    return 1 if found else 0


def main() -> object:
    role = sys.argv[1:2]
    if role == ["serve"]:
        return serve(sys.argv[2])
    if role == ["ask"]:
        ask(sys.argv[2], json.loads(sys.argv[3]))
    if role == ["rank"]:
        return rank_main(*json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the jobs")
    parser.add_argument("--only", help="cases whose description matches this expression")
    parser.add_argument("--fresh", action="store_true", help="a new Python for every rank")
    parser.add_argument("--verbose", action="store_true", help="a line for every job")
    parser.add_argument("--seed", type=int, default=0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    sys.exit(campaign(parser.parse_args()))


if __name__ == "__main__":
    kept = main()  # until the interpreter ends, as a script's variables are
