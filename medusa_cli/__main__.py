"""The entry point of `python -m medusa_cli`."""

from medusa_cli.cli import main

if __name__ == "__main__":
    main()
