"""Encoders of images, and the projectors behind them."""
