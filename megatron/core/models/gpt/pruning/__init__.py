"""Smaller models from trained ones: what matters little to texts is left out (Minitron, arXiv:2407.14679)."""
