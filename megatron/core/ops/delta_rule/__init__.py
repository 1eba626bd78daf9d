"""The gated delta rule: linear attention whose state forgets, and overwrites what it holds of a key.

Tensors are laid out ``[b, l, heads, …]``; no collectives, no settings.
"""
