"""The tests; a package so that ranks can import test functions by name."""
