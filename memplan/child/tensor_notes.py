"""
What is known of tensors while the program runs: where weights, gradients, optimizer state, batches and buffers of gradients lie, and when.

A note is an address, and how many allocations there had been; which allocation that is, and so what its memory was for, is worked out from
the whole trace (`traces/trace.py`). Looked at is what autograd and modules tell of by themselves, and every object of the process when a
step's first backward begins and when the step ends.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils.checkpoint

from memplan.child.live_objects import (
    addresses,
    is_part_of_leaf,
    is_whole,
    may_matter,
    named_parameters,
    names_of,
    objects_of,
    own_buffers,
    own_parameters,
    parts_of,
    possible_weights,
    shapes_of,
    state_share,
    states_of,
    those_of_both,
    trained_by,
)
from memplan.child.not_compiled import not_compiled, not_followed
from memplan.child.shard_buffers import bucket_buffers, classes_of_shards, shards_of, whole_gradients

NOTED = ("parameters", "gradients", "optimizer_state", "workspaces", "batch_data")
"""What can be told of a tensor that is there; the rest are activations."""

MOST_SCANS = 64
"""How often every object of the process is looked at when a backward begins; with many micro-batches the later ones are like the first."""

CHECKPOINT_FLAGS = (
    "gradient_checkpointing", "grad_checkpointing", "use_gradient_checkpointing", "use_checkpoint", "use_checkpointing",
    "activation_checkpointing", "use_activation_checkpointing",
)  # fmt: skip
"""How models call the switch: transformers, timm, and what people write."""


class TensorNotes:
    """
    Notes where tensors lie.

    *num_allocs*: how many allocations there have been; *is_recording*: whether their events are recorded still, else a note tells nothing.
    """

    def __init__(self, num_allocs: Callable[[], int], is_recording: Callable[[], bool]) -> None:
        self._num_allocs, self._is_recording = num_allocs, is_recording
        self.notes: dict[str, set[tuple[int, int]]] = {name: set() for name in NOTED}
        self.checkpointing_off: set[str] = set()
        """Why activation checkpointing, which is switched on, has no effect."""
        self.without_gradient: set[str] = set()
        self.without_gradient_bytes = 0
        self.dropped_gradients: set[str] = set()
        """Parameters whose gradients a backward made, and which had none when their optimizer stepped."""
        self.dropped_bytes = 0
        """What these gradients take, with the state that their optimizer would make."""
        self._hooked: set[int] = set()
        self._accumulated: set[int] = set()
        """Parameters whose gradients autograd tells of; that of another the program, or FSDP, puts there itself."""
        self._at_backward: dict[int, weakref.ref[Any]] = {}
        """What may be a weight, as it was seen when the step's first backward began."""
        self._at_end: dict[int, weakref.ref[Any]] = {}
        """The same at the end of the last step."""
        self._has_looked = False
        self._num_scans = 0
        self._gradients_seen: set[int] = set()
        self._gradients_missed: set[int] = set()
        self._copies: set[tuple[int, int]] = set()  # what lasts as weights do: weights that no module has, or an optimizer's state
        self._has_accumulated = False  # a gradient, by backward
        self._has_optimizer = False  # of PyTorch
        self._checkpoints = self._flagged = 0
        self._moves = 0
        self.first_dimensions: list[list[int]] = []
        """Of what may be a batch, as each backward began that was looked at: how many samples, or rows, its tensors have."""

    def attach(self) -> None:
        """Have modules and checkpointed regions tell of themselves."""
        self._watch_checkpointing()
        self._watch_weights()

    def backward_begins(self) -> None:
        """Look at every object, as long as that tells anything new."""
        if self._is_recording() and self._num_scans < MOST_SCANS:
            self._num_scans += 1
            self.scan()

    def step_ends(self) -> None:
        """Begin to count the checkpointed regions of the next step."""
        self._checkpoints = 0

    def in_all(self, workspaces: set[tuple[int, int]]) -> dict[str, list[tuple[int, int]]]:
        """Return all notes, with those of *workspaces*; at the end of the program."""
        has_other_optimizer = self._has_accumulated and not self._has_optimizer  # fastai's, Keras's
        self.notes["optimizer_state" if has_other_optimizer else "parameters"] |= self._copies
        self.notes["workspaces"] |= workspaces
        return {name: sorted(found) for name, found in self.notes.items()}

    def _watch_checkpointing(self) -> None:
        """Count the regions that are checkpointed, under both implementations."""
        module: Any = torch.utils.checkpoint
        generator, apply = module._checkpoint_without_reentrant_generator, module.CheckpointFunction.apply

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*arguments: Any, **keywords: Any) -> Any:
                self._checkpoints += 1
                return function(*arguments, **keywords)

            return not_followed(call)

        module._checkpoint_without_reentrant_generator = counted(generator)
        module.CheckpointFunction.apply = counted(apply)

    def _watch_weights(self) -> None:
        """Note parameters when a module gets them, and when it moves: what shards them gives the whole ones up before the first step."""
        move, note_present = torch.nn.Module._apply, not_compiled(self._note_present)

        @functools.wraps(move)
        def moved(module: Any, *arguments: Any, **keywords: Any) -> Any:
            self._moves += 1
            try:
                return move(module, *arguments, **keywords)
            finally:
                self._moves -= 1
                if self._moves == 0:
                    note_present(parameter for _, parameter in named_parameters(module))

        torch.nn.Module._apply = not_followed(moved)  # type: ignore[method-assign]
        torch.nn.modules.module.register_module_parameter_registration_hook(
            not_compiled(lambda _, __, parameter: self._note_present([parameter]))
        )

    def _note_present(self, parameters: Iterable[Any]) -> None:
        found = addresses(parameter for parameter in parameters if parameter is not None) if self._is_recording() else set()
        if found:
            count = self._num_allocs()
            self.notes["parameters"] |= {(address, count) for address in found}

    def look_for_gradients(self, optimizer: Any) -> None:
        """Note which parameters have a gradient, and where those lie that autograd tells nothing of."""
        trained = trained_by([optimizer])
        found = [parameter.grad for parameter in trained if parameter.grad is not None and id(parameter) not in self._accumulated]
        if self._is_recording() and found:
            self.notes["gradients"] |= {(address, self._num_allocs()) for address in addresses(found)}
        for parameter in trained:
            if parameter.requires_grad and getattr(parameter, "_local_tensor", parameter).numel():  # else its shard is empty
                (self._gradients_missed if parameter.grad is None else self._gradients_seen).add(id(parameter))

    def scan(self) -> None:
        """Look at every object: hook new parameters, note the batch, see whether checkpointing is on and has no effect."""
        count = self._num_allocs()
        plain: list[Any] = []
        put_there: list[Any] = []  # gradients
        self._flagged = 0
        kinds = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
        fsdp, zero = classes_of_shards()
        modules, optimizers, tensors, checkpointed, *found_of_shards = objects_of(*kinds, _kept_by_checkpointing(), *fsdp, *zero)
        tensors = list(filter(may_matter, tensors))
        buffers = addresses(bucket_buffers(each for found in found_of_shards[len(fsdp) :] for each in found))
        compiled = is_compiled()
        if not self._has_looked:
            self._has_looked = True
            self._at_backward = possible_weights(modules, tensors)
            self._note_copies(those_of_both(self._at_end, self._at_backward), modules, optimizers, count)
        for tensor in filter(is_whole, tensors):
            if not isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad and tensor.grad_fn is None:
                is_mask = tensor.dtype == torch.bool
                if not compiled or not (is_mask or tensor.is_floating_point()):  # what a compiled forward keeps looks the same as a batch
                    plain.append(tensor)
            elif tensor.is_leaf and tensor.requires_grad:
                if tensor.grad is not None and id(tensor) not in self._accumulated:
                    put_there.append(tensor.grad)
                if id(tensor) not in self._hooked:
                    self._hooked.add(id(tensor))
                    tensor.register_post_accumulate_grad_hook(self._note_gradient)
        gradients = addresses([*whole_gradients(each for found in found_of_shards[: len(fsdp)] for each in found), *put_there])
        saved = addresses(kept.val for kept in checkpointed if isinstance(kept.val, torch.Tensor))
        weights = addresses(self._trained_or_of_modules(modules, tensors, count))  # a flat one is of no module
        weights |= addresses(plain) & addresses(tensor for tensor in tensors if is_part_of_leaf(tensor))  # gathered, of FSDP
        self.notes["parameters"] |= {(address, count) for address in weights}
        self.notes["gradients"] |= {(address, count) for address in gradients}
        self.notes["workspaces"] |= {(address, count) for address in buffers}
        for module in modules:
            self._check_checkpointing(module)
        self._note_weights(modules, optimizers, count)  # a program without an optimizer ends no step
        if self._flagged and not self._checkpoints and not compiled:
            modules_on = f"{self._flagged} module{'s' if self._flagged > 1 else ''}"
            self.checkpointing_off.add(f"the switch is on in {modules_on}, and not one region was checkpointed")
        batch_data = addresses(plain) - saved - weights - gradients - buffers
        self.notes["batch_data"] |= {(address, count) for address in batch_data}
        self.first_dimensions.append(sorted({tensor.shape[0] for tensor in plain if tensor.dim() and addresses([tensor]) & batch_data}))

    def _check_checkpointing(self, module: Any) -> None:
        names = [name for name in CHECKPOINT_FLAGS if module.__dict__.get(name) is True]
        if not names:
            return
        if module.training:
            self._flagged += 1
        elif any(
            parameter.requires_grad for _, parameter in named_parameters(module)
        ):  # else a frozen teacher: it has nothing to checkpoint
            self.checkpointing_off.add(f"{type(module).__name__} is in eval mode")

    def _note_gradient(self, parameter: Any) -> None:
        self._has_accumulated = True
        self._accumulated.add(id(parameter))
        if self._is_recording() and parameter.grad is not None:
            count = self._num_allocs()
            self.notes["gradients"] |= {(address, count) for address in addresses(parts_of(parameter.grad))}

    def note_what_lasts(self) -> None:
        """Note where parameters, buffers and the optimizers' states lie now."""
        count = self._num_allocs()
        modules, optimizers, tensors = objects_of(torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
        tensors = list(filter(may_matter, tensors))
        self._note_weights(modules, optimizers, count)
        loose = self._trained_or_of_modules(modules, tensors, count)
        self.notes["parameters"] |= {(address, count) for address in addresses([*trained_by(optimizers), *loose])}
        self.notes["optimizer_state"] |= {(address, count) for address in addresses(states_of(optimizers))}
        kept = [each.grad for each in (*(own for module in modules for own in own_parameters(module)), *trained_by(optimizers))]
        self._at_end = possible_weights(modules, tensors, apart_from=(gradient for gradient in kept if gradient is not None))
        self._note_copies(those_of_both(self._at_backward, self._at_end), modules, optimizers, count, are_of_whole_models=True)
        self._has_looked = False
        missed = self._gradients_missed - self._gradients_seen
        dropped = missed & self._accumulated
        trained = {id(each): each for each in trained_by(optimizers)}
        self.without_gradient, self.without_gradient_bytes = _named(missed - dropped, trained, modules)
        self.dropped_gradients, gradient_bytes = _named(dropped, trained, modules)
        self.dropped_bytes = round(gradient_bytes * (1 + state_share(optimizers)))

    def _note_weights(self, modules: list[Any], optimizers: list[Any], count: int) -> None:
        """Note parameters and buffers; of a step that is compiled, the module that it became has the optimizer's state as buffers."""
        buffers = addresses(tensor for module in modules for tensor in own_buffers(module)) - addresses(states_of(optimizers))
        parameters = [parameter for module in modules for parameter in own_parameters(module)]
        weights = addresses([*parameters, *shards_of(parameters)]) | buffers
        self.notes["parameters"] |= {(address, count) for address in weights}

    def _trained_or_of_modules(self, modules: list[Any], tensors: list[Any], count: int) -> list[Any]:
        """Return the Parameters among *tensors* that are weights for certain; the others, as which Keras keeps its moments, are copies."""
        found = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        of_modules = {id(parameter) for module in modules for parameter in own_parameters(module)}
        others = {id(parameter): parameter for parameter in found if not parameter.requires_grad and id(parameter) not in of_modules}
        self._copies |= {(address, count) for address in addresses(others.values())}
        return [parameter for parameter in found if id(parameter) not in others]

    def _note_copies(
        self, lasting: list[Any], modules: list[Any], optimizers: list[Any], count: int, *, are_of_whole_models: bool = False
    ) -> None:
        """
        Note those of *lasting* that belong to no module and last as weights do, as an average or a teacher that is kept in a dict.

        They look like weights and were there at the end of the last step, as no batch is. Or, where they *are_of_whole_models*, they
        were there from a step's first backward to its end, and have most of the shapes of the weights: an average that is made anew in each
        step. A batch may have the shape of one.
        """
        weights = [weight for module in modules for weight in (*own_parameters(module), *own_buffers(module))]
        gradients = [weight.grad for weight in (*weights, *trained_by(optimizers)) if weight.grad is not None]
        taken = addresses([*weights, *gradients, *states_of(optimizers)])
        copies = {address: tensor for tensor in lasting for address in addresses([tensor]) if address not in taken}
        shapes = shapes_of(modules)
        if optimizers:  # what requires a gradient, and is trained by none of them, may be an input
            copies = {address: tensor for address, tensor in copies.items() if tensor.shape in shapes}
        if not are_of_whole_models or len({tensor.shape for tensor in copies.values()}) > len(shapes) / 2:
            for address, tensor in copies.items():
                (self.notes["parameters"] if tensor.requires_grad else self._copies).add((address, count))
        self._has_optimizer = self._has_optimizer or bool(optimizers)


def _named(missed: set[int], trained: Mapping[int, Any], modules: list[Any]) -> tuple[set[str], int]:
    """Return what the parameters whose id is in *missed* are called, or how many they are, and the bytes of those that are *trained*."""
    names = (names_of(missed, modules) or {f"{len(missed)} parameters"}) if missed else set()
    return names, sum(each.numel() * each.element_size() for number, each in trained.items() if number in missed)


def _kept_by_checkpointing() -> type:
    """Return the class that keeps a result of selective activation checkpointing as `val`: it has no graph, as a batch has none."""
    kind: type = getattr(torch.utils.checkpoint, "_VersionWrapper", _NoneBefore)  # private
    return kind


class _NoneBefore:
    """Nothing is of this class: PyTorch before 2.4 has no selective checkpointing of this kind."""


def is_compiled() -> bool:
    """Say whether torch.compile has compiled anything: it has its own way with checkpoints."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])
