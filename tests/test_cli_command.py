"""The `quintain` command: exit statuses, messages without tracebacks, help without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quintain.cli.main import main

RECIPE = """\
algorithm: own_algorithm:RecordingTrainer
model: scratch:tiny
dataset: own_algorithm:prompts
rewards: own_algorithm:shortness
max_steps: 4
"""

MODULE = """
import json
from dataclasses import dataclass
from pathlib import Path
from quintain.configs import OnlineRLConfig
from quintain.configs.runfolder import write_config
from quintain.errors import RewardError

@dataclass
class RecordingConfig(OnlineRLConfig):
    strength: float = 1.0
    stop_at: int | None = None
    fail: bool = False

class Run:
    step, interrupted = 0, False

class RecordingTrainer:
    config_class = RecordingConfig

    def __init__(self, model, reward_funcs, args, train_dataset, eval_dataset, peft_config):
        self.arguments = {
            "model": model, "rewards": [f.__name__ for f in reward_funcs], "prompts": len(train_dataset),
            "eval": eval_dataset, "peft": peft_config and peft_config.r,
        }
        self.config, self.run, self.max_steps = args, Run(), args.max_steps

    def train(self, resume_from):
        if self.config.fail:
            raise RewardError("shortness failed on row 5") from ZeroDivisionError("the cause")
        write_config(self.config.output_dir, self.run.settings)
        self.arguments["resume"] = resume_from and str(resume_from)
        Path(self.config.output_dir, "metrics.jsonl").write_text(json.dumps(self.arguments))
        self.run.step = self.config.stop_at or self.max_steps
        self.run.interrupted = bool(self.config.stop_at)

def prompts():
    import datasets
    return datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])

def shortness(completions, **kwargs):
    return [-float(len(text)) for text in completions]
"""


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a recipe and an algorithm of one's own, which records how it was called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_algorithm", raising=False)
    (tmp_path / "own_algorithm.py").write_text(MODULE)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def metrics(folder):
    import json

    return json.loads((folder / "metrics.jsonl").read_text())


def test_train_builds_the_trainer_that_a_recipe_names(workplace, capsys):
    assert main(["train", "recipe.yaml", "--output_dir", "runs/a", "--peft", "{r: 4}", "--strength=2e-1"]) == 0
    expected = {
        "model": "scratch:tiny",
        "rewards": ["shortness"],
        "prompts": 2,
        "eval": None,
        "peft": 4,
        "resume": None,
    }
    assert metrics(workplace / "runs/a") == expected
    text = capsys.readouterr().err
    assert "own_algorithm:RecordingTrainer" in text and "4 steps" in text and "runs/a/model" in text
    assert "strength: 0.2" in (workplace / "runs/a/config.yaml").read_text()


def test_a_run_is_neither_mixed_with_another_nor_lost(workplace, capsys):
    arguments = ["train", "recipe.yaml", "--output_dir", "runs/a"]
    assert main(arguments) == 0
    (workplace / "runs/a/notes.txt").write_text("mine")
    (workplace / "runs/a/completions.jsonl").write_text("old")
    assert main([*arguments, "--overwrite", "--model", "[1]"]) == 2
    assert (workplace / "runs/a/completions.jsonl").exists()
    assert main([*arguments, "--overwrite"]) == 0
    assert not (workplace / "runs/a/completions.jsonl").exists() and (workplace / "runs/a/notes.txt").exists()


def test_resume_takes_the_settings_of_the_run_wherever_it_lies_now(workplace):
    assert main(["train", "recipe.yaml", "--output_dir", "runs/a", "--strength", "3"]) == 0
    (workplace / "runs/a").rename(workplace / "runs/b")
    assert main(["train", "--resume", "runs/b", "--max_steps", "9"]) == 0
    assert metrics(workplace / "runs/b")["resume"] == "runs/b"
    text = (workplace / "runs/b/config.yaml").read_text()
    assert "strength: 3" in text and "max_steps: 9" in text and "output_dir: runs/b" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "No recipe"),
        (["train", "recipe.yaml", "another.yaml"], "One recipe at a time"),
        (["train", "recipe.yaml", "--strengt", "1"], "Did you mean 'strength'"),
        (["train", "recipe.yaml", "--temperature", "0"], "temperature"),
        (["train", "recipe.yaml", "--peft", "{rank: 4}"], "LoraConfig"),
        (["train", "recipe.yaml", "--resume"], "lacks its value"),
        (["train", "--resume", "nowhere"], "not a run's folder"),
        (["train", "--resume", "nowhere", "--overwrite"], "--resume continues"),
        (["train", "--resume", "nowhere", "--algorithm", "ppo"], "--algorithm cannot be changed"),
        (["train", "nowhere"], "no recipe 'nowhere'"),
        (["doctor", "nowhere"], "nowhere"),
        (["selftest", "ppp"], "Did you mean 'ppo'"),
    ],
)
def test_bad_usage_is_one_message_and_status_2(workplace, capsys, arguments, said):
    """T08 f: nothing trained, no traceback."""
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert said in message and "Traceback" not in message
    assert not (workplace / "runs").exists()


def test_an_unknown_command_is_bad_usage(capsys):
    with pytest.raises(SystemExit) as error:
        main(["trian"])
    assert error.value.code == 2


def test_a_run_started_from_python_is_continued_there(workplace, capsys):
    (workplace / "run").mkdir()
    (workplace / "run/config.yaml").write_text("algorithm: GRPOTrainer\nlearning_rate: 1.0e-05\n")
    assert main(["train", "--resume", "run"]) == 2
    assert "trainer.train(resume_from='run')" in capsys.readouterr().err


def test_stopping_early_is_status_130(workplace):
    assert main(["train", "recipe.yaml", "--output_dir", "runs/a", "--stop_at", "2"]) == 130


def test_a_failure_in_training_is_status_1_and_shows_its_cause(workplace, capsys):
    assert main(["train", "recipe.yaml", "--output_dir", "runs/a", "--fail", "true"]) == 1
    message = capsys.readouterr().err
    assert "ZeroDivisionError: the cause" in message and "quintain: shortness failed on row 5" in message


@pytest.mark.parametrize(
    ("arguments", "shown", "hidden"),
    [
        (["--help"], ["train", "doctor", "report", "selftest"], []),
        (["train", "--help"], ["--learning_rate", "Peak learning rate", "--resume RUN", "--overwrite"], ["--eta"]),
        (["train", "tiny", "--help"], ["--eta", "--group_logits"], ["--cliprange", "--num_iterations"]),
        (["train", "tiny", "--algorithm", "ppo", "--help"], ["--cliprange"], ["--eta", "--init_kl_coef"]),
    ],
)
def test_help_shows_every_setting_and_imports_no_torch(arguments, shown, hidden):
    code = (
        "import sys\nfrom quintain.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert all(text in done.stdout for text in shown) and not any(f"{text} " in done.stdout for text in hidden)


def test_a_bad_recipe_is_refused_before_torch_is_imported(workplace):
    code = "import sys\nfrom quintain.cli.main import main\nprint(main(sys.argv[1:]), 'torch' in sys.modules)"
    arguments = ["train", "tiny", "--num_generatons", "4"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


def test_doctor_status_says_whether_there_is_an_error(tmp_path, capsys, monkeypatch):
    from quintain.cli import doctor
    from quintain.monitor.health import Finding

    def finding(severity):
        return Finding(severity, "kl_jump", 7, "KL rose", {"kl": 0.51234}, "a collapse", "lower it", "note", "fit")

    for severities, status in (([], 0), (["warn"], 0), (["note", "error"], 1)):
        monkeypatch.setattr(doctor, "examine_run", lambda _, found=severities: [finding(name) for name in found])
        assert main(["doctor", str(tmp_path)]) == status
    text = capsys.readouterr().out
    assert "nothing looks wrong" in text and "errors: 1, other findings: 1" in text
    assert "error at step 7: KL rose [kl_jump]" in text and "kl 0.5123" in text and "lower it" in text


@pytest.mark.slow
def test_the_tiny_recipe_trains_and_resumes(tmp_path, monkeypatch):
    """Design 2: what a run's folder holds."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", "tiny", "--max_steps", "3", "--save_steps", "2"]) == 0
    run = tmp_path / "runs" / "tiny"
    for name in ("config.yaml", "metrics.jsonl", "completions.jsonl", "checkpoints", "model", "report.html"):
        assert (run / name).exists(), name
    assert main(["train", "--resume", "runs/tiny", "--max_steps", "5"]) == 0
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5
