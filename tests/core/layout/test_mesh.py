import copy

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import DeviceError, ShardingError
from isoshard.core.layout.mesh import as_mesh, describe_mesh, hybrid_mesh, make_mesh, mesh_of
from isoshard.core.layout.virtual_devices import simulate_devices
from tests import fresh


def _ids(mesh):
    return [device.id for device in mesh.devices.flat]


class TestMakeMesh:
    def test_devices_and_types(self):
        mesh = make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=AxisType.Auto)
        assert mesh.axis_types == (AxisType.Auto,) * 3 and type(mesh) is Mesh
        assert _ids(make_mesh((3,), ("x",))) == [0, 1, 2]
        assert _ids(make_mesh((2, 2), ("x", "y"), devices=jax.devices()[::-1])) == [7, 6, 5, 4]
        assert make_mesh((), ()).devices.size == 1
        assert copy.deepcopy([mesh])[0] is mesh
        layout = NamedSharding(mesh, P("a"))
        assert copy.deepcopy({"layout": layout}) == {"layout": layout}

    def test_too_few_devices(self):
        with pytest.raises(DeviceError, match=r"needs 32.*there are 8 \(cpu\).*iso\.simulate_dev"):
            make_mesh((4, 8), ("x", "y"))
        with pytest.raises(DeviceError, match=r"needs 2 devices, there are 0\."):
            make_mesh((2,), ("x",), devices=[])

    def test_no_grid(self):
        for shape, names, what in (
            ((2, 4), ("x",), "2 entries for 1 names"),
            ((2, 4), ("x", "x"), "'x' is used 2 times"),
            ((2, 0), ("x", "y"), "size 0 is not a positive integer"),
            ((2, True), ("x", "y"), "size True"),
            ((2.0,), ("x",), "size 2.0"),
            ((2,), (3,), "name 3 is not a string"),
            ((2, -1, 2), ("x", "x"), r"3 entries for 2 names.*size -1.*'x' is used 2"),
        ):
            with pytest.raises(ShardingError, match=what):
                make_mesh(shape, names)


class TestHybridMesh:
    def test_slices_are_outermost(self):
        mesh = hybrid_mesh((2, 2), (2, 1), ("data", "model"))
        assert mesh.devices.shape == (4, 2)
        assert mesh.axis_types == make_mesh((4, 2), ("a", "b")).axis_types
        assert _ids(mesh) == list(range(8))
        mesh = hybrid_mesh((4, 1), (1, 2), ("a", "b"))
        assert [[d.id for d in row] for row in mesh.devices] == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert _ids(hybrid_mesh((4,), (2,), ("x",))) == list(range(8))
        assert hybrid_mesh((2, 4), (1, 1), ("x", "y")) == make_mesh((2, 4), ("x", "y"))

    def test_real_slices_are_found(self, monkeypatch):
        asked = []

        class Device:
            platform = "tpu"

            def __init__(self, number):
                self.slice_index = number // 4

        def create(ici, dcn, devices):
            asked.append((ici, dcn, len(devices)))
            return np.array(real).reshape(2, 4)

        real = jax.devices()
        monkeypatch.setattr(jax, "devices", lambda: [Device(i) for i in range(8)])
        monkeypatch.setattr("jax.experimental.mesh_utils.create_hybrid_device_mesh", create)
        assert hybrid_mesh((1, 4), (2, 1), ("d", "m")).shape == {"d": 2, "m": 4}
        assert asked == [((1, 4), (2, 1), 8)]

    def test_wrong_number_of_devices(self):
        with pytest.raises(DeviceError, match=r"3 slices of 4 devices .* 12 devices, there are 8"):
            hybrid_mesh((4,), (3,), ("x",))
        with pytest.raises(ShardingError, match="dcn has 1 entries for 2 names"):
            hybrid_mesh((2, 2), (2,), ("x", "y"))


class TestAsMesh:
    def test_a_mesh_and_an_object_that_has_one(self, mesh):
        class Theirs:
            def get_jax_mesh(self):
                return mesh

        types = (AxisType.Auto, AxisType.Explicit)
        mixed = jax.make_mesh((2, 4), ("x", "y"), axis_types=types)
        assert as_mesh(mixed) is mixed and as_mesh(Theirs()) is mesh
        assert describe_mesh(mesh) == "'x' (2), 'y' (4)"
        with pytest.raises(TypeError, match=r"jax\.sharding\.Mesh.*not a tuple"):
            as_mesh((2, 4))

    def test_abstract(self):
        with pytest.raises(ShardingError, match="no devices"):
            as_mesh(AbstractMesh((2,), ("x",)))
        with pytest.raises(ShardingError, match="abstract mesh"):
            mesh_of(NamedSharding(AbstractMesh((2,), ("x",)), P("x")))


class TestSimulateDevices:
    def test_another_number_after_the_start(self):
        with pytest.raises(DeviceError, match=r"already running on 8 cpu.*new process"):
            simulate_devices(4)
        assert simulate_devices(8) == jax.devices() and len(jax.devices()) == 8
        for n in (0, -1, 2.0, True, "8"):
            with pytest.raises(DeviceError, match="pass an integer"):
                simulate_devices(n)
        assert jax.config.values["jax_num_cpu_devices"] == 8

    def test_before_the_start(self, tmp_path):
        program = (
            "import isoshard as iso\n"
            "print(len(iso.simulate_devices(5)), iso.make_mesh((5,), ('x',)).size)"
        )
        done = fresh.run(program, cwd=tmp_path)
        assert done.stdout.split() == ["5", "5"], done.stderr
