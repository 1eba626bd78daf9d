"""Drills: faults of machines, made on purpose in real runs, which end as documented with nothing lost."""
