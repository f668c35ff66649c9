"""Slots: what a target or reference policy holds, how it moves, what it says about tokens (S5-S8, S11, S27, S29)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quintain.policies.slots import Slot, TargetUpdate, swapped


def parameters(value: float) -> dict[str, nn.Parameter]:
    return {"weight": nn.Parameter(torch.tensor([value]))}


def test_a_slot_starts_as_a_copy_that_carries_no_gradient():
    """S6."""
    online = parameters(1.0)
    slot = Slot(online)
    assert torch.equal(slot.tensors["weight"], online["weight"])
    assert not slot.tensors["weight"].requires_grad
    assert slot.tensors["weight"].data_ptr() != online["weight"].data_ptr()


def test_moving_the_online_weights_in_place_leaves_the_slot_where_it_was():
    online = parameters(1.0)
    slot = Slot(online)
    with torch.no_grad():
        online["weight"].add_(5.0)
    assert slot.tensors["weight"].item() == 1.0


def test_the_ema_follows_the_rule_by_hand():
    """S7: 0.9 * 1 + 0.1 * 2 = 1.1, then 0.9 * 1.1 + 0.1 * 2 = 1.19."""
    online = parameters(1.0)
    slot, update = Slot(online), TargetUpdate(decay=0.9)
    with torch.no_grad():
        online["weight"].fill_(2.0)
    update(slot, online)
    assert slot.tensors["weight"].item() == pytest.approx(1.1)
    update(slot, online)
    assert slot.tensors["weight"].item() == pytest.approx(1.19)


def test_the_gaps_of_the_quoted_demonstration_do_not_fall():
    """W2: decay 0.9, online weights 1.0 then 1.5, 0.8, 1.2, 0.5, 1.0; the gap is read before each update."""
    online = parameters(1.0)
    slot, update = Slot(online), TargetUpdate(decay=0.9)
    gaps = []
    for value in (1.5, 0.8, 1.2, 0.5, 1.0):
        with torch.no_grad():
            online["weight"].fill_(value)
        gaps.append(abs(online["weight"].item() - slot.tensors["weight"].item()))
        update(slot, online)
    assert gaps == pytest.approx([0.5, 0.25, 0.175, 0.5425, 0.0117], abs=1e-4)


def test_a_periodic_copy_moves_only_every_nth_step():
    online = parameters(1.0)
    slot, update = Slot(online), TargetUpdate(decay=None, every=3)
    with torch.no_grad():
        online["weight"].fill_(7.0)
    seen = []
    for _ in range(3):
        update(slot, online)
        seen.append(slot.tensors["weight"].item())
    assert seen == [1.0, 1.0, 7.0]


def test_the_period_survives_a_restart():
    online = parameters(1.0)
    update = TargetUpdate(decay=None, every=2)
    update(Slot(online), online)
    restored = TargetUpdate(decay=None, every=2)
    restored.load_state_dict(update.state_dict())
    slot = Slot(online)
    with torch.no_grad():
        online["weight"].fill_(3.0)
    restored(slot, online)
    assert slot.tensors["weight"].item() == 3.0


def test_swapping_computes_with_the_slot_and_restores_the_online_weights_even_after_an_error():
    layer = nn.Linear(1, 1, bias=False)
    online = dict(layer.named_parameters())
    slot = Slot(online)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        slot.tensors["weight"].fill_(10.0)
    with pytest.raises(RuntimeError), torch.no_grad(), swapped(online, slot):
        assert layer(torch.ones(1, 1)).item() == 10.0
        raise RuntimeError
    assert layer(torch.ones(1, 1)).item() == 2.0


def test_an_average_of_half_precision_weights_does_not_stand_still():
    """S7: bfloat16 around 1 has steps of 0.0078, far above 0.01 * 0.0469; 1 + 0.0469 * (1 - 0.99^200) = 1.0406."""
    online = {"weight": nn.Parameter(torch.tensor([1.0], dtype=torch.bfloat16))}
    slot, update = Slot(online, full_precision=True), TargetUpdate(decay=0.99)
    with torch.no_grad():
        online["weight"].fill_(1.05)
    moved_to = online["weight"].item()  # 1.046875, the nearest that there is
    for _ in range(200):
        update(slot, online)
    assert slot.tensors["weight"].item() == pytest.approx(1 + (moved_to - 1) * (1 - 0.99**200), abs=1e-5)
    with torch.no_grad(), swapped(online, slot):
        assert online["weight"].dtype == torch.bfloat16
        assert online["weight"].item() == pytest.approx(1.0391, abs=1e-4)
    assert online["weight"].item() == moved_to
