"""Count and time what a rank does while it runs.

- `counters` has the numbers of one channel, `process` the sums, steps and metrics of a process;
- `device_clock` and `lane_timing` measure the work of a device, by the device's own clock;
- `ranges` shows operations to profilers;
- `stall` notices operations that some ranks never submit;
- `reporter` sends the numbers to the launcher, with those of NVIDIA's library.
"""
