"""What a rank counts and times while it runs.

- `counters` has the numbers of one channel, `statistics` the sums, steps and metrics of a process;
- `device_clock` and `lane_timing` measure what a device does behind the host's back;
- `ranges` shows operations to profilers;
- `stall` notices operations that some ranks never submit;
- `reporter` sends the numbers to the launcher, with those of the GPU (`gpu_use`).
"""
