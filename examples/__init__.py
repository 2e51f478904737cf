"""Examples to run and to read."""
