"""Checkpoints whose weights lie on a grid, chosen by what the model does with texts."""
