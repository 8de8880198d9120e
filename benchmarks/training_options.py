"""What benchmarks/training.py can be asked, and what it says about itself."""

from __future__ import annotations

import argparse
import os

from benchmarks.gpus import add_mps_option
from benchmarks.named_hosts import add_hosts_option
from benchmarks.parts import add_limit_option
from benchmarks.processes import positive
from benchmarks.promises import add_options
from benchmarks.training_report import LABELS

CPU_MODELS = ["mlp", "cnn", "transformer", "resnet18"]
GPU_MODELS = ["resnet50", "gpt", "gpt2"]
CONTENDERS = ["plain", "ours", "ddp"]
SECONDS = {"cpu": 120.0, "cuda": 30.0, "xpu": 120.0}  # for a race
TIMEOUT = {"cpu": 900.0, "cuda": 180.0, "xpu": 900.0}  # for a part
PERCENT = {"cpu": 1.5, "cuda": 1.0, "xpu": 1.5}  # of a ratio, within which it is to be known

DESCRIPTION = """\
Compare a training step with hvd.DistributedOptimizer to one under DistributedDataParallel (Gloo or
NCCL; gradient_as_bucket_view, static_graph) and to one without communication, on this machine.

Each contender has processes of its own, as when you run it. They take turns of a few steps, while
the others sleep; OMP_NUM_THREADS is 1. A sample is a turn of the slowest rank. A ratio is taken of
turns that follow each other, and its median is the result. Efficiency is the step of a program
without communication over ours.

Losses and peak memory are those of further processes, which for memory have all loaded both
libraries: it is about what training needs. On a GPU memory is what torch has allocated there at the
highest, in the processes that were timed.

With fewer GPUs than ranks, ranks share them: each gets a NCCL_HOSTID of its own, so that NCCL joins
them over sockets, for DDP as for Horovod; and MPS is started, which lets their kernels run side by
side. A part that fails or takes too long does not lose the others.
"""
EPILOG = """\
examples:
  python benchmarks/training.py                    2 ranks and 1, all four models, some minutes
  python benchmarks/training.py --np 2 --models mlp --seconds 30 --only-speed
  taskset -c 2,3 python benchmarks/training.py     two cores of a larger machine
  python benchmarks/training.py --np 4 8           where there are that many cores
  python benchmarks/training.py --np 4 8 --bind    the same with one core for each rank
  python benchmarks/training.py --np 4 8 --strong  or with the batch of two ranks in all
  python benchmarks/training.py --np 2 --same-heap --only-speed
  python benchmarks/training.py --np 1 --device cuda
  python benchmarks/training.py --np 2 4 --device cuda     one GPU will do; 10 minutes
  python benchmarks/training.py --np 2 --device cuda --hosts several --only-speed \\
      --contenders plain ours ddp ours_bf16 ddp_bf16 ours_next --seconds 20 --limit 300
  python benchmarks/training.py --check            for scripts: status 1 when a promise is missed

Close other programs first: numbers of a busy machine mean little.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--np", type=int, nargs="+", default=[2, 1], metavar="N", help="numbers of ranks (2 1)"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=[*CPU_MODELS, *GPU_MODELS],
        metavar="MODEL",
        help=f"which to train, of {' '.join([*CPU_MODELS, *GPU_MODELS])} (on a CPU "
        f"{' '.join(CPU_MODELS)}; on a GPU resnet50 gpt, and for one rank resnet50 gpt2)",
    )
    parser.add_argument("--device", choices=["cpu", "cuda", "xpu"], default="cpu", help="(cpu)")
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=list(LABELS),
        default=CONTENDERS,
        metavar="WHO",
        help=f"who takes part, of {' '.join(LABELS)} ({' '.join(CONTENDERS)}): _bf16 has gradients "
        "in bfloat16 on the wire, _next is overlap_forward=model",
    )
    add_hosts_option(parser)
    parser.add_argument(
        "--only-speed", action="store_true", help="skip the loss and memory sections"
    )
    parser.add_argument(
        "--force-reduction",
        action="store_true",
        help="reduce gradients also where there is one rank, as an elastic job does",
    )
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="let Horovod tune itself first (HOROVOD_AUTOTUNE), until it has settled",
    )
    parser.add_argument(
        "--strong",
        action="store_true",
        help="share the batches of two ranks out among all: a job that is spread, not enlarged",
    )
    parser.add_argument(
        "--batch",
        type=count,
        metavar="N",
        help="samples of a rank in a step (as many as the model's table says)",
    )
    parser.add_argument(
        "--bind",
        action="store_true",
        help="give each rank one core, as schedulers do that count cores; otherwise DDP's threads "
        "run on those that no rank uses",
    )
    parser.add_argument(
        "--turn", type=count, metavar="N", help="steps of a turn (a tenth of a second's, or 5)"
    )
    parser.add_argument(
        "--percent",
        type=positive,
        metavar="P",
        help="end a race once its ratios are known to within this (1.5; on cuda 1)",
    )
    add_mps_option(parser)
    add_common(parser, "training", seconds="120; on cuda 30", timeout="900; on cuda 180")
    add_limit_option(parser)
    parser.set_defaults(seconds=None, timeout=None)
    options = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    if options.bind and max(options.np) > cores:
        parser.error(f"--bind: {max(options.np)} ranks need as many cores, and there are {cores}")
    options.seconds = options.seconds or SECONDS[options.device]
    options.timeout = options.timeout or TIMEOUT[options.device]
    options.percent = options.percent or PERCENT[options.device]
    return options


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def add_common(
    parser: argparse.ArgumentParser, name: str, seconds: str = "120", timeout: str = "900"
) -> None:
    """The options of every benchmark that has contenders train by turns.

    `seconds` and `timeout` are what to say of their defaults.
    """
    parser.add_argument(
        "--seconds",
        type=positive,
        default=120.0,
        metavar="S",
        help=f"most time spent on each model and number of ranks ({seconds}); less where the "
        "machine is so quiet that the ratios are known to 1.5 %% before",
    )
    parser.add_argument(
        "--same-heap",
        action="store_true",
        help="let all contenders keep freed memory the way that horovodrun and hvd.init() do, by "
        "variables of the allocators: what is left is the difference that communication makes",
    )
    add_options(parser, name)
    parser.add_argument(
        "--timeout",
        type=positive,
        default=900.0,
        metavar="S",
        help=f"give up on a part, such as the race of one model, after this long ({timeout})",
    )


def models_of(options: argparse.Namespace, size: int) -> list[str]:
    """What `size` ranks train."""
    if options.models:
        return list(options.models)
    if options.device == "cpu":
        return CPU_MODELS
    return ["resnet50", "gpt2"] if size == 1 else ["resnet50", "gpt"]
