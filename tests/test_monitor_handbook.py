"""docs/doctor.md says what the rules do."""

from __future__ import annotations

from pathlib import Path

from quintain.monitor.handbook import describe_rules, update_page
from quintain.monitor.rules import RULES

DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_about_the_doctor_is_up_to_date() -> None:
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    assert page == update_page(page), "run: python -m quintain.monitor.handbook docs/doctor.md"


def test_every_rule_is_described_once_with_its_numbers() -> None:
    text = describe_rules()
    for rule in RULES:
        assert text.count(f"### `{rule.name}` ") == 1
        assert rule.threshold in text
        assert "{" not in rule.threshold
