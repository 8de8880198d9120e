"""What ``horovodrun --help`` and ``--help-all`` say besides the options themselves.

`options.parser` shows it.
"""

from __future__ import annotations

USAGE = "horovodrun -np N [options] COMMAND [ARGUMENT ...]"

SHORT_HELP = f"""\
usage: {USAGE}

Run COMMAND as N processes that train together. Options come before COMMAND.

  -np N                  how many processes
  -H HOST:SLOTS,...      where, through ssh, or srun in a Slurm job (default:
                         the batch job's hosts, else all on this machine)
  --output-ranks RANKS   show only the output of these ranks, such as 0,2-3
  --output-filename DIR  also write each rank's output to files under DIR
  --progress             show step, steps per second and slow ranks on one line
  --dashboard            serve a live page about the job
  --scaling 1,2,4        run at several sizes, and print what that gains
  --min-np N             elastic: go on while N processes are left
  --dry-run              show what would be started, and start nothing
  --check                check whether a job could run on the hosts, and why not
  --check-build          show which frameworks and devices work here

examples:
  horovodrun -np 2 python train.py --lr 0.1
  horovodrun -np 8 -H node1:4,node2:4 python train.py
  horovodrun -np 4 --output-ranks 0 --output-filename logs python train.py
  horovodrun -np 4 --min-np 2 --host-discovery-script ./hosts python train.py

Ctrl-C once interrupts the processes, twice kills them.
horovodrun --help-all explains all options, and docs/horovodrun.md some more.
"""

DESCRIPTION = """\
Run COMMAND as N processes that train together. Each finds its place through
hvd.init(). Options of horovodrun come before COMMAND; everything from COMMAND
on is passed to it untouched.
"""

EXAMPLES = """\
examples:
  two processes on this machine:
    horovodrun -np 2 python train.py --lr 0.1
  four on each of two hosts, through ssh:
    horovodrun -np 8 -H node1:4,node2:4 python train.py
  the same, with the hosts as a range or in a file:
    horovodrun -np 8 -H 'node[1-2]:4' python train.py
    horovodrun -np 8 --hostfile hosts.txt python train.py
  show what would be started, and where:
    horovodrun -np 8 -H 'node[1-2]:4' --dry-run python train.py
  keep each rank's output under logs/rank.<n>/ and show only that of rank 0:
    horovodrun -np 4 --output-filename logs --output-ranks 0 python train.py
  stop at breakpoint() in rank 0, and talk to the debugger:
    horovodrun -np 2 --attach 0 python train.py
  go on when hosts are lost, and use new ones:
    horovodrun -np 8 --min-np 4 --host-discovery-script ./hosts python train.py
  the same training on 1, 2, 4 and 8 processes, three times each, as a table:
    horovodrun --scaling 1,2,4,8 --repeat 3 --strong python train.py
  see whether a job could run on these hosts, and what is wrong with them:
    horovodrun --check -H node1:4,node2:4
  what is usable on this machine:
    horovodrun --check-build

One rank that fails ends the others; the exit status is that of the first to
fail (128 + n after signal n), and its last lines of stderr are shown at the
end. Ctrl-C once interrupts the workers, twice kills them. An option beats the
configuration file, which beats environment variables (HOROVOD_*).
"""
