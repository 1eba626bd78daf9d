"""Files that start a run on a cluster, read and compared with the run's settings."""
