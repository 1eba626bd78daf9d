"""Answers that a model in training generates, and what becomes of them: rewards, and batches to learn from."""
