"""Tasks about images: what a model says of them, and whether it is right."""
