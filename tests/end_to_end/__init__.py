"""The real scripts, as a user runs them."""
