import inspect

import pytest

from isoshard.core import errors


def test_families():
    for name in ("SpecError", "UnevenError", "UnrepresentableError", "CopyError"):
        assert issubclass(getattr(errors, name), errors.ShardingError)
        assert issubclass(getattr(errors, name), ValueError)
    assert issubclass(errors.DeviceError, RuntimeError)
    assert not issubclass(errors.DeviceError, errors.ShardingError)
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert all(inspect.getdoc(kind) for kind in classes)


def test_faults_are_raised_together():
    errors.raise_collected([])
    fault = errors.UnevenError("w: size 3")
    with pytest.raises(errors.UnevenError, match=r"(?m)^w: size 3$") as caught:
        errors.raise_collected([fault])
    assert caught.value is fault
    faults = [fault, errors.CopyError("b: must move")]
    with pytest.raises(errors.ShardingError, match=r"(?s)2 leaves.*w: size 3.*b: must") as caught:
        errors.raise_collected(faults)
    assert type(caught.value) is errors.ShardingError
