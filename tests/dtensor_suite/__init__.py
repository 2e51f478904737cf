"""torch's own tests of DTensor, on one process: `python -m tests.dtensor_suite FOLDER`."""
