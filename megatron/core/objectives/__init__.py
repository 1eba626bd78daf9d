"""What a model is trained for in place of its family's own loss."""
