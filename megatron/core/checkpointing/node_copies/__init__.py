"""Copies of a run's state on its nodes, each rank's on its own node and on those of partners."""
