"""Settings of the dynamo backend, by torch_xla's name."""

__all__ = ["skip_input_data_check"]

skip_input_data_check = False
"""Has no effect: inputs that are still to be computed become part of the program."""
