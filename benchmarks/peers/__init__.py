"""Other ways to run the same torch problems, each in a process of its own.

`launch` calls a function of each. Those that need other packages than isoshard have a Python
environment of their own (`benchmarks.environments`); one that is not there is reported as such.
"""
