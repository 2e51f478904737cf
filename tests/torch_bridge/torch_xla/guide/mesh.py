"""A mesh with and without names."""

import collections

import numpy as np
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import Mesh

num_devices = xr.global_runtime_device_count()
mesh_shape = (num_devices // 2, 2)
device_ids = np.array(range(num_devices))
mesh = Mesh(device_ids, mesh_shape, ("x", "y"))
assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
assert mesh.shape() == collections.OrderedDict([("x", 4), ("y", 2)])
assert mesh.size() == 8
assert mesh.get_axis_name_idx("y") == 1
assert Mesh(device_ids, mesh_shape).shape() == collections.OrderedDict([(0, 4), (1, 2)])
assert Mesh.from_str(str(mesh)).shape() == mesh.shape()
