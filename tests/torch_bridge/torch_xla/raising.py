"""The one thing that the scripts of this folder need of pytest."""


def raises(kind, function, *args):
    """The error's words; fails unless it is raised."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
