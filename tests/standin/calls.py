"""Calling the simulated GPU's functions themselves, in a process of its own that has no PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

from memplan.hardware.catalog import find_gpu
from memplan.hardware.torch_install import TorchBuild
from memplan.standin.build import build
from memplan.standin.launch import environment_for

_FIRST = """
import ctypes, json, random, sys
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

cuda = ctypes.CDLL(None)  # the device is in the process already
driver = ctypes.CDLL("libcuda.so.1")
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3

def malloc(size):
    pointer = c_void_p()
    assert cuda.cudaMalloc(byref(pointer), c_size_t(size)) == 0
    return pointer.value

def free(address):
    assert cuda.cudaFree(c_void_p(address)) == 0

def write(address, content):
    assert cuda.cudaMemcpy(c_void_p(address), bytes(content), c_size_t(len(content)), HOST_TO_DEVICE) == 0

def read(address, size):
    content = ctypes.create_string_buffer(bytes([0xAA]) * size, size)
    assert cuda.cudaMemcpy(content, c_void_p(address), c_size_t(size), DEVICE_TO_HOST) == 0
    return content.raw

def copy(to, from_, size):
    assert cuda.cudaMemcpy(c_void_p(to), c_void_p(from_), c_size_t(size), DEVICE_TO_DEVICE) == 0

def fill(address, value, size):
    assert cuda.cudaMemset(c_void_p(address), c_int(value), c_size_t(size)) == 0

def kernel():
    assert driver.cuLaunchKernel(*[None] * 11) == 0

asked = []
READER = ctypes.CFUNCTYPE(None, c_void_p, c_size_t)

@READER
def reader(to, size):
    asked.append(size)
    ctypes.memset(to, 0x77, size)  # what the recorder would answer
"""


def on_device(torch_build: TorchBuild, code: str, *, gpu: str = "t4", num_gpus: int = 1, **variables: str) -> str:
    """Run *code* where the functions of `_FIRST` call the device, on that GPU or as many of them; return what it prints."""
    environment = environment_for([find_gpu(gpu)] * num_gpus, build(torch_build), inherited=os.environ) | variables
    run = subprocess.run([sys.executable, "-c", _FIRST + code], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout
