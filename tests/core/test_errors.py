import inspect

import pytest

from isoshard.core import errors

LAYOUT = ["SpecError", "UnevenError", "UnrepresentableError", "CopyError"]


@pytest.mark.parametrize("name", LAYOUT)
def test_layout_errors_are_value_errors_of_one_family(name):
    kind = getattr(errors, name)
    assert issubclass(kind, errors.ShardingError)
    assert issubclass(kind, ValueError)


def test_device_errors_are_no_layout_errors():
    assert issubclass(errors.DeviceError, RuntimeError)
    assert not issubclass(errors.DeviceError, errors.ShardingError)


def test_every_class_has_a_docstring():
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(classes) >= 6
    assert all(inspect.getdoc(kind) for kind in classes)


def test_nothing_collected_raises_nothing():
    errors.raise_collected([])


def test_a_single_fault_is_raised_as_it_is():
    fault = errors.UnevenError("w: size 3")
    with pytest.raises(errors.UnevenError, match=r"(?m)^w: size 3$") as caught:
        errors.raise_collected([fault])
    assert caught.value is fault


def test_faults_of_different_kinds_share_the_base_class():
    faults = [errors.UnevenError("w: size 3"), errors.CopyError("b: must move")]
    with pytest.raises(errors.ShardingError, match=r"(?s)2 leaves.*w: size 3.*b: must") as caught:
        errors.raise_collected(faults)
    assert type(caught.value) is errors.ShardingError
