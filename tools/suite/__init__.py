"""What the test suite costs, and which changes of the package it notices."""
