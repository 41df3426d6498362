"""
Datasets that live on the GPU, for your training program: `DeviceCachedDataset` and `DeviceLoader`, in the place of Dataset and DataLoader.

    from memplan.data import DeviceCachedDataset, DeviceLoader

    cached = DeviceCachedDataset(dataset, dtype=torch.bfloat16)
    for images, labels in DeviceLoader(cached, batch_size=256, shuffle=True):
        ...
"""

from memplan.data.device_cache import DeviceCachedDataset, SizedDataset
from memplan.data.device_loader import DeviceLoader, LoaderState
from memplan.data.samples import TensorPart
from memplan.errors import SampleError

__all__ = ["DeviceCachedDataset", "DeviceLoader", "LoaderState", "SampleError", "SizedDataset", "TensorPart"]
