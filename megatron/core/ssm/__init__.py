"""Mixers with a state of fixed size: state-space layers, at every layout."""
