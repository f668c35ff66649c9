"""What a dataset reference leads to, and how a wrong one or a broken file is reported."""

from __future__ import annotations

import json
import sys
import types

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from quintain.data import load_dataset_reference
from quintain.errors import ConfigError, DataError

ROWS = [{"prompt": "2+2", "answer": "4"}, {"prompt": "3+3", "answer": "6"}]


@pytest.fixture
def write(tmp_path):
    def write(name: str, content: str | bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return write


def test_jsonl_csv_parquet_and_lists_give_the_same_rows(write, tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "rows.parquet")
    references = [
        write("rows.jsonl", "\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS) + "\n"),
        write("rows.json", json.dumps(ROWS, indent=1)),
        write("rows.csv", "prompt,answer\r\n2+2,4\r\n3+3,6\r\n"),
        str(tmp_path / "rows.parquet"),
        tmp_path / "rows.parquet",
        ROWS,
        Dataset.from_list(ROWS),
        DatasetDict({"train": Dataset.from_list(ROWS)}),
    ]
    for reference in references:
        assert list(load_dataset_reference(reference)) == ROWS, reference


def test_a_saved_dataset_folder_is_read_back(tmp_path):
    DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "d")
    assert len(load_dataset_reference(tmp_path / "d")) == 2
    assert len(load_dataset_reference(tmp_path / "d", default_split="test")) == 1


def test_chat_prompts_survive_as_they_are(write):
    chat = [{"role": "user", "content": "Hello\u2028there"}]
    path = write("chat.jsonl", json.dumps({"prompt": chat}, ensure_ascii=False))
    assert load_dataset_reference(path)[0] == {"prompt": chat}


def test_a_key_that_only_later_rows_have_is_kept():
    assert load_dataset_reference([{"prompt": "a"}, {"prompt": "b", "level": 2}])["level"] == [None, 2]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": "y"}\n{"prompt: 1}\n', ["line 3", "not valid JSON", '{"prompt: 1}']),
        ("a.jsonl", '{"prompt": "x"}\n["y"]\n', ["line 2", "expected a JSON object"]),
        ("a.json", '[\n{"prompt": "x"},\n{"prompt" "y"}\n]', ["line 3", "not valid JSON"]),
        ("a.jsonl", b'{"prompt": "x"}\n{"prompt": "caf\xe9"}\n', ["line 2", "not UTF-8", "0xe9", "iconv"]),
        ("a.jsonl", "\n\n", ["is empty"]),
        ("a.csv", "prompt,answer\n", ["is empty"]),
        ("a.csv", "prompt,answer\na,1\nb\n", ["line 3", "2 fields", "prompt, answer"]),
        ("a.csv", "prompt,answer\na,1,2\n", ["line 2", "2 fields"]),
        ("a.csv", "prompt,prompt\na,1\n", ["names a column twice"]),
        ("a.csv", 'prompt,answer\n"a" b,1\n', ["line 2", "not valid CSV"]),
        ("a.parquet", "PAR1", ["not a readable Parquet file"]),
    ],
)
def test_a_broken_file_is_reported_with_its_line(write, name, content, words):
    with pytest.raises(DataError) as caught:
        load_dataset_reference(write(name, content))
    assert all(word in str(caught.value) for word in [name, *words]), caught.value


def test_a_file_of_another_kind_is_refused(write):
    with pytest.raises(ConfigError, match=r"\.jsonl, \.json, \.csv, \.parquet.*rows\.txt"):
        load_dataset_reference(write("rows.txt", "x"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        ([{"prompt": "a"}, "b"], "row 1: expected a dict"),
        (
            [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}],
            r"'prompt' mixes str \(row 0\) and list \(row 1\).*all text or all lists",
        ),
        ([{"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": [1]}], r"'answer' mixes str .* and list"),
    ],
)
def test_unusable_rows_are_refused(rows, words):
    with pytest.raises(DataError, match=words):
        load_dataset_reference(rows)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("nowhere.jsonl", ["nowhere.jsonl", "no such file"]),
        ("a/b/c", ["a/b/c", "no such file"]),
        ("builtin:reversl", ["Did you mean 'reversal'", "stories"]),
        ("builtn:reversal", ["Did you mean 'builtin'"]),
        ("json:nothing_here", ["no function 'nothing_here'"]),
        ("org/name?strem=1", ["'strem'", "streaming"]),
        ({"prompt": ["a"]}, ["list of dicts", "dict"]),
        (7, ["int"]),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(reference, words):
    with pytest.raises(ConfigError) as caught:
        load_dataset_reference(reference)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_hub_dataset_is_asked_for_with_its_options(monkeypatch):
    asked = {}

    def load_dataset(path, *, split, **options):
        asked.update(path=path, split=split, options=options)
        return Dataset.from_list(ROWS) if split else DatasetDict({"train": Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert len(load_dataset_reference("openai/gsm8k?name=main&streaming=false", split="train[:2]")) == 2
    assert asked == {
        "path": "openai/gsm8k",
        "split": "train[:2]",
        "options": {"name": "main", "streaming": False},
    }
    assert len(load_dataset_reference("openai/gsm8k")) == 2


def test_a_hub_dataset_that_cannot_be_had_is_one_clear_error(monkeypatch):
    def load_dataset(path, **options):
        raise FileNotFoundError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=r"'org/name' could not be loaded from the Hub: offline"):
        load_dataset_reference("org/name")


def test_a_function_is_called_with_its_options(tmp_path, monkeypatch):
    (tmp_path / "my_tasks.py").write_text(
        "def make(size: int, tag='t', scale=1.0):\n"
        "    return [{'prompt': f'{tag}{index}', 'scale': scale} for index in range(size)]\n"
        "def wrong():\n    return 3\n"
        "def broken():\n    import no_such_dependency\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made = load_dataset_reference("my_tasks:make?size=2&tag=01&scale=2")
    assert list(made) == [{"prompt": "010", "scale": 2.0}, {"prompt": "011", "scale": 2.0}]
    for reference, words in [
        ("my_tasks:make", "missing a required argument: 'size'"),
        ("my_tasks:make?siz=2", "unknown option 'siz'.*Did you mean 'size'"),
        ("my_tasks:make?size=2&scale=x", "'scale'.*must be a float"),
        ("my_tasks:make?size", "name=value"),
        ("my_tasks:make?size=1&size=2", "twice"),
        ("my_tasks:wrong", "got int"),
        ("my_tasks:mak", "Did you mean 'make'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            load_dataset_reference(reference)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load_dataset_reference("my_tasks:broken")


def test_splits_are_chosen_by_name_by_slice_or_by_default():
    both = DatasetDict(
        {name: Dataset.from_list([{"prompt": name + str(i)} for i in range(10)]) for name in ("train", "b")}
    )
    only = DatasetDict({"b": both["b"]})
    assert load_dataset_reference(both, split="b")["prompt"][0] == "b0"
    assert load_dataset_reference(both, split="train[:30%]")["prompt"] == ["train0", "train1", "train2"]
    assert load_dataset_reference(both, split="b[8:]+train[:1]")["prompt"] == ["b8", "b9", "train0"]
    assert load_dataset_reference(both)["prompt"][0] == "train0"
    assert load_dataset_reference(only)["prompt"][0] == "b0"
    assert load_dataset_reference(ROWS, split="train[1:]")["prompt"] == ["3+3"]


@pytest.mark.parametrize("split", ["tran", "test", "train[oops]"])
def test_an_unknown_split_is_refused_with_the_known_ones(split):
    with pytest.raises(ConfigError, match=r"no split.*Splits: train;"):
        load_dataset_reference(ROWS, split=split)


def test_an_empty_slice_is_refused():
    with pytest.raises(DataError, match="is empty"):
        load_dataset_reference(ROWS, split="train[2:]")


def test_columns_are_renamed_from_theirs_to_ours():
    dataset = load_dataset_reference([{"question": "q", "answer": "a"}], columns={"question": "prompt"})
    assert list(dataset) == [{"prompt": "q", "answer": "a"}]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": "question"}, r"no column 'prompt'.*Did you mean \{question: prompt\}"),
        ({"questio": "prompt"}, "Did you mean 'question'.*Columns: question, answer"),
        ({"question": "answer"}, "'answer', which .* has already"),
    ],
)
def test_a_wrong_renaming_is_refused(columns, words):
    with pytest.raises(ConfigError, match=words):
        load_dataset_reference([{"question": "q", "answer": "a"}], columns=columns)


def test_a_stream_is_passed_on_and_renamed():
    stream = IterableDataset.from_generator(lambda: iter([{"q": "a"}]))
    assert list(load_dataset_reference(stream, columns={"q": "prompt"})) == [{"prompt": "a"}]


def test_reasoning_gym_rows_carry_what_its_scorer_needs(monkeypatch):
    entry = {"question": "1+1?", "answer": "2", "metadata": {"source_dataset": "sums", "terms": (1, 1)}}
    asked = {}

    def create_dataset(name, **settings):
        asked.update(name=name, **settings)
        if "terms" in settings:
            raise TypeError("unexpected keyword argument 'terms'")
        return [entry]

    gym = types.ModuleType("reasoning_gym")
    gym.create_dataset = create_dataset
    factory = types.ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym", gym)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    row = load_dataset_reference("reasoning_gym:sums?size=1&digits=[1, 2]")[0]
    assert asked == {"name": "sums", "size": 1, "seed": 0, "digits": [1, 2]}
    assert row["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert row["answer"] == "2"
    assert json.loads(row["metadata"]) == {"source_dataset": "sums", "terms": [1, 1]}
    with pytest.raises(ConfigError, match=r"no task 'sum'.*Did you mean 'sums'"):
        load_dataset_reference("reasoning_gym:sum")
    with pytest.raises(ConfigError, match="unexpected keyword argument"):
        load_dataset_reference("reasoning_gym:sums?terms=3")


def test_reasoning_gym_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"pip install 'quintain\[reasoning-gym\]'"):
        load_dataset_reference("reasoning_gym:sums")
