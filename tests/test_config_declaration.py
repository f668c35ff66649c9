"""Faults in a config class of one's own are named, not passed over."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from quintain import ConfigError, OnlineRLConfig
from quintain.configs.rules import Number


def test_a_forgotten_dataclass_decorator_is_named():
    class Own(OnlineRLConfig):
        margin: float = 0.1

    with pytest.raises(ConfigError, match=r"Own\.margin is not a setting.*add @dataclass"):
        Own()


def test_a_rule_for_a_misspelt_field_is_refused():
    @dataclass
    class Own(OnlineRLConfig):
        margin: float = 0.1
        rules = {**OnlineRLConfig.rules, "margn": Number("[0, 1]")}

    with pytest.raises(ConfigError, match=r"rules names 'margn'.*'margin'"):
        Own()


def test_a_kl_weight_that_is_no_field_is_refused():
    @dataclass
    class Own(OnlineRLConfig):
        kl_weights = ("beta",)

    with pytest.raises(ConfigError, match="kl_weights names 'beta'"):
        Own()


def test_a_shared_field_cannot_silently_get_a_second_meaning():
    @dataclass
    class Own(OnlineRLConfig):
        temperature: float = 0.5
        rules = {**OnlineRLConfig.rules, "temperature": Number("(0, 10]")}

    with pytest.raises(ConfigError, match=r"'temperature' a rule of its own.*Rename"):
        Own()


def test_an_interval_that_is_none_says_how_one_is_written():
    with pytest.raises(ConfigError, match=r"'\[0, inf\)'.*got '0 to inf'"):
        Number("0 to inf")
