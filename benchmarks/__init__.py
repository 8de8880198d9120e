"""Speed of Horovod against its peers, as ratios measured in the same run."""
