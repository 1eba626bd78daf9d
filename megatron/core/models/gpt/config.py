"""A decoder language model has no settings but those of every model."""

GROUPS: tuple[type, ...] = ()
