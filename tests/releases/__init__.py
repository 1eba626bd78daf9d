"""Versions that a release promises, tried: an environment for each pair of Python and torch, and a flow in it."""
