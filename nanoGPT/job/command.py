"""What programs other than the trainers need: a command line, errors in one sentence, and the ranks of a launcher."""

import contextlib
import inspect
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

from nanoGPT.distributed.environment import environment_number
from nanoGPT.errors import ConfigError
from nanoGPT.job.program import HELP, collect_flags, convert_texts, join_flag_values, print_help, unbreakable_output


def command_line(target: Any, arguments: list[str]) -> Any:
    """Parse a command line, and create a dataclass or call a function with the values.

    Args:
        target: the dataclass or the function. Its parameters are the flags.
        arguments: the command line without the program's name. `--flag` without a value sets a bool to True.

    Raises:
        ConfigError: a flag is unknown or missing, or a value has the wrong type.
        SystemExit: with code 0 for `--help`.
    """
    if HELP & {*arguments}:
        print_help(target)
    values = convert_texts(target, collect_flags(join_flag_values(arguments)))
    for parameter in inspect.signature(target).parameters.values():
        if parameter.default is parameter.empty and parameter.name not in values:
            raise ConfigError(f"--{parameter.name} is missing: add --{parameter.name}=VALUE; --help describes it")
    return target(**values)


@contextlib.contextmanager
def report_errors(output_is_optional: bool = True) -> Iterator[None]:
    """Wrap a program: print a ConfigError, an OSError or a MemoryError as one sentence, and exit with code 2.

    KeyboardInterrupt is raised again. If it is not caught, the program prints "stopped" and exits with code 130.

    Args:
        output_is_optional: whether the program continues if its output cannot be printed. Characters that the terminal
            cannot show are printed with a backslash in any case.
    """
    if not output_is_optional and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    with unbreakable_output() if output_is_optional else contextlib.nullcontext():
        try:
            yield
        except (ConfigError, OSError, MemoryError) as error:
            print(f"error: {str(error) or 'out of memory: use a machine with more memory'}", file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.excepthook = lambda *_: print("\nstopped", file=sys.stderr)
            raise


def read_launched_ranks(micro_batches: int) -> tuple[int, int]:
    """Return this process's rank and the number of ranks, for a program that only a launcher can start.

    Raises:
        ConfigError: no launcher started this process, or the ranks cannot share the micro-batches of a step equally.
    """
    rank, ranks = environment_number("RANK"), environment_number("WORLD_SIZE")
    if not ranks or "RANK" not in os.environ:
        raise ConfigError("this program needs a launcher: start it with torchrun --standalone --nproc_per_node=2")
    if micro_batches < ranks or micro_batches % ranks:
        raise ConfigError(
            f"--micro_batches={micro_batches} cannot be divided by {ranks} ranks: use a multiple of {ranks}"
        )
    return rank, ranks
