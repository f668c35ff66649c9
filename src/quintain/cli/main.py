"""The `quintain` command. Nothing heavy is imported before the arguments have been checked."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from quintain.cli.reproduce import add_reproduce_parser
from quintain.errors import ConfigError, DataError, QuintainError

OK, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    0: done. 1: a check failed, or training did. 2: the command, the configuration or the data is wrong.
    130: interrupted; a checkpoint has been written.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # `train` takes any field of any config as an option, which argparse cannot express.
        if words[:1] == ["train"]:
            from quintain.cli.train import train

            return train(words[1:])
        options = _parser().parse_args(words)
        return int(options.run(options))
    except (ConfigError, DataError) as error:
        print(f"quintain: {error}", file=sys.stderr)
        return BAD_USAGE
    except QuintainError as error:
        if error.__cause__ is not None:
            # The cause is code we do not own, such as a reward function: its author needs the line.
            traceback.print_exception(error.__cause__)
        print(f"quintain: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("quintain: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quintain", description="Online reinforcement learning of language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"quintain {version('quintain')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    commands.add_parser("train", help="train a model as a recipe says (quintain train --help)")

    selftest = commands.add_parser(
        "selftest", help="show that every algorithm learns on this machine, in half a minute"
    )
    selftest.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help="only these, such as tpo ppo")
    selftest.set_defaults(run=_selftest)

    doctor = commands.add_parser("doctor", help="what looks wrong in a run, what it means and what to do")
    doctor.add_argument("folder", type=Path, metavar="RUN", help="a run's folder")
    doctor.set_defaults(run=_doctor)

    report = commands.add_parser("report", help="write a run, or several beside each other, as one HTML page")
    report.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    report.add_argument("--output", type=Path, metavar="FILE", help="where to write; default: report.html in the run")
    report.set_defaults(run=_report)

    add_reproduce_parser(commands)
    return parser


def _selftest(options: argparse.Namespace) -> int:
    from quintain.cli.selftest import selftest

    return selftest(options.algorithms)


def _doctor(options: argparse.Namespace) -> int:
    from quintain.cli.doctor import doctor

    return doctor(options.folder)


def _report(options: argparse.Namespace) -> int:
    from quintain.report.render import write_report

    print(write_report(options.folders, options.output))
    return OK


if __name__ == "__main__":
    sys.exit(main())
