"""The entry point of `medusa` and of `python -m medusa_cli`, which imports nothing before it can handle Ctrl-C."""

import os
import sys


def main() -> None:
    """Runs a command line; Ctrl-C ends it with a message of one line, even while modules are imported."""
    try:
        _open_closed_streams()
        from medusa_cli.cli import main

        main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)  # errors.INTERRUPTED; Ctrl-C may have interrupted the import of errors


def _open_closed_streams() -> None:
    """Opens /dev/null for closed standard streams, because other files would get the streams' numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


if __name__ == "__main__":
    main()
