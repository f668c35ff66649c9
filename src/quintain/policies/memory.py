"""How many tokens an update may hold at once: what the activations of a token take, and what memory leaves for them.

Nothing here looks inside the model: its forward pass is counted on a few dummy tokens, at three lengths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from quintain.errors import ConfigError
from quintain.policies.probe import evaluating, two_completions
from quintain.types import Rollouts

GIB = 2**30
SHARE_OF_FREE = 0.8
"""Of the memory that is free, what a run takes unless it is told. The rest is for sampling's caches, and for others."""
ASSUMED_FREE = 4 * GIB
"""Bytes taken as free where the system does not say."""
RESERVE = GIB // 4
"""Bytes set aside for what libraries load and allocate only when the first step runs."""
SAFETY = 1.5
"""What an update was measured to take at most, over `ActivationCost`: allocators do not fit tensors without gaps."""
LAYERS_AT_ONCE = 5
"""A layer's activations, recomputed under gradient checkpointing, and their gradients; and of the layers before it what
the C library has not given back to the system, which for a checkpointed model was measured to be most of the peak."""
PROBE_TOKENS = 12
"""Tokens of the dummy prompt, and the step by which its two completions grow, where the run's own lengths allow."""


@dataclass(frozen=True)
class ActivationCost:
    """Bytes that an update holds at its peak besides weights, gradients and optimizer state.

    bytes(tokens, width) = fixed + tokens * (token + pair * width), for tokens in sequences of `width`
    """

    fixed: float
    """However many tokens there are, such as weights cast to half precision."""
    token: float
    pair: float
    """Of two tokens of one sequence, where attention keeps a number for each pair."""

    def of(self, tokens: float, width: int) -> float:
        return self.fixed + tokens * (self.token + self.pair * width)

    def tokens_within(self, room: float, width: int) -> int:
        """Most tokens whose bytes are within `room`."""
        return max(0, int((room - self.fixed) / (self.token + self.pair * width)))


def activation_cost(
    forward: Callable[[Rollouts], Any],
    module: torch.nn.Module,
    *,
    layers: int,
    checkpointing: bool,
    longest: int = 4 * PROBE_TOKENS,
) -> ActivationCost:
    """Measure a policy's forward pass on one prompt with two completions, at three lengths.

    At its peak, in the backward pass, an update holds all that the forward pass kept, the gradients of its largest
    tensor, and LAYERS_AT_ONCE times what a layer has. Only the completions of the probe grow, so that every token is
    counted as one that is predicted, output layer included.

    Args:
        forward: the pass that an update makes; its result keeps the graph.
        module: holds the weights, which are not counted; its mode is as in training.
        layers: transformer layers that the activations spread over evenly.
        checkpointing: gradient checkpointing is on, which evaluation mode turns off.
        longest: tokens that the model certainly takes; the probe's longest sequences have no more.
    """
    unit = max(1, min(PROBE_TOKENS, longest // 4))
    exist = {value.untyped_storage().data_ptr() for value in (*module.parameters(), *module.buffers())}
    device = next(module.parameters()).device

    def peak(completion: int) -> float:
        rollouts = probe(unit, completion, device)
        kept = kept_for_backward(lambda: forward(rollouts), exist)
        whole = sum(kept)
        if checkpointing:
            with evaluating(module):
                whole = sum(kept_for_backward(lambda: forward(rollouts), exist))
        return sum(kept) + 2 * max(kept) + LAYERS_AT_ONCE * whole / layers

    first, second, third = (peak(number * unit) for number in (1, 2, 3))
    # The parabola through the three points, which lie `step` tokens apart.
    step, tokens = 2 * unit, 3 * unit
    pair = max(0.0, (third - 2 * second + first) / (2 * step**2))
    token = (second - first) / step - pair * (2 * tokens + step)
    fixed = max(0.0, first - token * tokens - pair * tokens**2)
    return ActivationCost(SAFETY * fixed, SAFETY * token, SAFETY * pair)


def kept_for_backward(forward: Callable[[], Any], exist: set[int]) -> list[int]:
    """Bytes of each distinct storage that autograd keeps for the backward pass.

    Args:
        forward: returns what keeps the graph alive.
        exist: addresses of storages that are there anyway.
    """
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = forward()  # held to the end, since an address that is free may be used again
    kept = [size for address, size in sizes.items() if address not in exist]
    del outputs
    return kept


def probe(prompt: int, completion: int, device: torch.device) -> Rollouts:
    """One prompt and two completions of it that differ, of so many tokens."""
    ids = torch.tensor([[0], [1]], device=device).repeat(1, completion)
    return two_completions(torch.zeros(prompt, dtype=torch.long, device=device), ids)


@dataclass(frozen=True)
class Lengths:
    """The longest that an update may meet, in tokens."""

    prompt: int
    completion: int
    group: int
    """Completions of a prompt."""
    shared: bool
    """Completions of a prompt share its tokens in one sequence."""
    together: bool
    """A micro-batch holds whole groups."""
    prompts: int
    """Prompts of a step, on this process."""

    @property
    def sequence(self) -> int:
        return self.prompt + self.completion

    @property
    def width(self) -> int:
        """Of the longest row that the model is given."""
        return self.prompt + self.completion * (self.group if self.shared else 1)

    @property
    def least(self) -> int:
        """Tokens computed in the smallest micro-batch that there can be."""
        return self._whole_group if self.together else self.sequence

    @property
    def step(self) -> int:
        """Tokens computed in a whole step."""
        return self.prompts * self._whole_group

    @property
    def _whole_group(self) -> int:
        return self.width if self.shared else self.group * self.sequence


def token_budget(
    cost: ActivationCost, lengths: Lengths, *, limit: float, used: float, to_come: float, setting: str
) -> int:
    """Tokens of a micro-batch that keep the peak below `limit`; no more than a whole step has.

    Args:
        limit: bytes at the peak, `used` and `to_come` included.
        used: bytes in use already, such as weights and policy slots.
        to_come: bytes of gradients and optimizer state.
        setting: how the limit was set, for the error.
    Raises:
        ConfigError: not even the smallest micro-batch fits.
    """
    room = limit - used - to_come - RESERVE
    needed = cost.of(lengths.least, lengths.width)
    if needed > room:
        what = f"one group of {lengths.group} sequences" if lengths.together else "one sequence"
        raise ConfigError(
            f"micro_batch_tokens='auto' finds no room for {what} of up to {lengths.sequence} tokens ({lengths.prompt} "
            f"of prompt, {lengths.completion} of completion): its activations take about {needed / GIB:.2f} GiB. "
            f"{setting} is a limit of {limit / GIB:.2f} GiB, of which {used / GIB:.2f} are in use, {to_come / GIB:.2f} "
            f"go to gradients and optimizer state and {RESERVE / GIB:.2f} are kept free. Lower max_completion_length "
            f"or max_prompt_length, train an adapter (LoRA), set gradient_checkpointing=True, or allow "
            f"memory_limit_gb={(limit - room + needed) / GIB + 0.05:.1f}."
        )
    return min(cost.tokens_within(room, lengths.width), lengths.step)


def used_bytes(device: torch.device, module: torch.nn.Module) -> int:
    """Bytes in use: of the GPU's tensors, or of this process; the module's weights where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return sum(value.nbytes for value in (*module.parameters(), *module.buffers()))
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """Bytes that this process may still take: on its GPU, or its share of the machine's memory and of its container's.

    Processes of one machine get equal shares. Where the system does not say, ASSUMED_FREE.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    known = [free for free in (available_memory(), container_memory()) if free is not None]
    return min(known, default=ASSUMED_FREE) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that the machine can give without swapping; None where it does not say."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(meminfo), re.M)
    return None if found is None else int(found[1]) * 1024


def container_memory(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes left below the memory limit of this process's control group or of one around it; None without a limit.

    Both versions of control groups are read. Memory of files that can be dropped counts as free.
    """
    left: list[int] = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit_file, usage_file = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file, usage_file = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
            if limit.isdigit() and usage.isdigit() and int(limit) < NO_LIMIT:
                droppable = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat"), re.M)
                left.append(max(0, int(limit) - int(usage) + (int(droppable[1]) if droppable else 0)))
            if folder == root:
                break
    return min(left, default=None)


NO_LIMIT = 2**60
"""Version 1 of control groups writes about 2**63 where there is no limit."""


def _read(path: Path) -> str:
    """A file's text; empty where there is none, as on other systems."""
    try:
        return path.read_text()
    except OSError:
        return ""
