"""One rank of benchmarks/dashboard.py: trains a small model for some steps when it is told to.

Started by horovodrun. Orders come from a socket, whose path is the argument: the launcher's pipes
are part of what is measured.
"""

from __future__ import annotations

import json
import socket
import sys
import time

import torch

import horovod.torch as hvd
from benchmarks.training_models import WORKLOADS

WARM_UP = 20


def main() -> None:
    path, model_name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    hvd.init()
    workload = WORKLOADS[model_name]
    torch.manual_seed(1)
    model = workload.model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    inputs, labels = workload.batch(torch.Generator().manual_seed(hvd.rank()))

    def train(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            hvd.stats.log(loss=loss.item())

    train(WARM_UP)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(path)
        with sock.makefile("rw", encoding="utf-8") as link:
            print(json.dumps(hvd.rank()), file=link, flush=True)
            for line in link:  # the moment at which all ranks begin
                time.sleep(max(0.0, json.loads(line) - time.monotonic()))
                began = time.monotonic()
                train(steps)
                print(json.dumps((time.monotonic() - began) / steps), file=link, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
