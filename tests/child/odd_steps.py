"""Steps that end their process, hang, or eat the host, each in its own way."""

import ctypes
import os
import signal
import sys
import time

import torch


def prints_without_end(device):
    """More than any pipe holds, until it is ended."""

    def step():
        while True:
            print("again " * 20)

    return step


def eats_the_host(device, gigabytes=4):
    """Takes more memory of the host than it may."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes * 2**30, gigabytes * 2**30))
    return lambda: bytearray(64 * gigabytes * 2**30)


def aborts(device):
    """As a failed C++ check does."""
    return os.abort


def segfaults(device):
    """As a broken extension does."""
    return lambda: ctypes.string_at(0)


def is_killed(device):
    """As the kernel does where the host's memory is over."""
    return lambda: os.kill(os.getpid(), signal.SIGKILL)


def leaves(device, status=0):
    """In its second step, by `sys.exit`."""
    steps = []

    def step():
        steps.append(torch.empty(1, device=device))
        if len(steps) == 2:
            sys.exit(status)

    return step


def leaves_at_once(device):
    """In the middle, without a word."""
    return lambda: os._exit(0)


def hangs_deaf(device):
    """Ignores being asked to end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return lambda: time.sleep(3600)


def returns_nothing(device):
    """Forgot to return its step."""


def stays_on_the_host(device):
    """Forgot to use the device."""
    return lambda: torch.empty(2**20)


def breaks_on_the_host(device):
    """Before anything was on the device."""
    return lambda: 1 / 0


def closes_its_output(device):
    """Has nothing more to say."""
    sys.stdout.close()
    os.close(2)
    return lambda: torch.empty(2**20, device=device)


def allocates(device, batch=1):
    """One MiB a sample."""
    return lambda: torch.empty(batch, 2**18, device=device)


class Callable:
    """A thing that is called as a function is."""

    def __call__(self, device, batch=1):
        """Return the step of `allocates`."""
        return allocates(device, batch)


instance = Callable()
